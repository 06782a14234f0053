"""The command `chat`: the answers of a base model and its adapter, at each depth and under each gates."""

import dataclasses
import io
import re
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch

from helpers.errors import user_error
from helpers.files import load_script
from helpers.tiny import tiny_ouro, with_adapter
from loopdropout_trainer import load_model, merge_and_save, use_gates
from loopdropout_trainer.generation import generate_greedy
from loopdropout_trainer.looped import use_depth
from loopdropout_trainer.saving.cards import read_card_fields
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.source import find_source


CHAT = load_script("recipes/chat.py")
QUESTION = "Question: 3 + 4?\nAnswer:"
TEMPLATE = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}<eos>{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """The folder of an adapter, with the recipe of its training, and its merged model in `merged`."""
    base = tmp_path_factory.mktemp("base")
    folder = tmp_path_factory.mktemp("run") / "adapter"
    tiny_ouro(initializer_range=0.3).save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = with_adapter(load_model(base), scale=0.2)
    model.save_pretrained(folder)
    recipe = "preparation: gsm8k\nnum_eval_examples: 3\nlearning_rate: 1e-3\n"
    (folder / "recipe.yaml").write_text(recipe)
    merge_and_save(model, folder / "merged", tokenizer, {"recipe": recipe})
    return folder


@pytest.fixture
def shown(monkeypatch):
    """The answers by title, in the dictionary that is shown."""
    tables = {}
    show_growing = CHAT.show_growing
    note = lambda title, answers: tables.update({title: answers}) or show_growing(title, answers)
    monkeypatch.setattr(CHAT, "show_growing", note)
    return tables


def answer(model, tokenizer, prompt, num_loops=4, gates=None):
    """One answer of at most eight tokens, which ends before another question."""
    gates = gates or [1.0] * num_loops
    with use_depth(model, num_loops), use_gates(model, gates):
        return generate_greedy(model, tokenizer, [prompt], 8, stop_strings=["Question:"], progress=False)[0]


def test_chat_shows_each_depth_and_gates(saved, shown, tokenizer):
    CHAT.main([str(saved), "3 + 4?", "--eval_num_loops", "2", "4", "--gates", "single_loop", "--max_new_tokens", "8"])
    model = load_model(saved)
    expected = {}
    for num_loops in (2, 4):
        base = answer(model, tokenizer, QUESTION, num_loops, [0.0] * num_loops)
        for loop, gates in enumerate(torch.eye(num_loops).tolist()):
            adapter = answer(model, tokenizer, QUESTION, num_loops, gates)
            expected[f"K = {num_loops}, loop {loop + 1}"] = {"base model": base, "adapter": adapter}
    assert shown == expected
    assert len({text for answers in expected.values() for text in answers.values()}) > 6


def test_checkpoint_has_the_prompts_of_its_run(saved, shown, tokenizer, tmp_path):
    checkpoint = shutil.copytree(saved, tmp_path / "checkpoint-2", ignore=shutil.ignore_patterns("merged"))
    recipe = (checkpoint / "recipe.yaml").rename(tmp_path / "recipe.yaml")
    CHAT.main([str(checkpoint), "3 + 4?", "--max_new_tokens", "8"])
    assert shown["K = 4"]["adapter"] == answer(load_model(saved), tokenizer, QUESTION)
    assert read_card_fields(checkpoint).recipe == recipe.read_text()


def test_chat_with_merged_model_has_one_column(saved, shown, tokenizer):
    CHAT.main([str(saved / "merged"), "3 + 4?", "--max_new_tokens", "8"])
    assert shown == {"K = 4": {"merged": answer(load_model(saved), tokenizer, QUESTION)}}
    with user_error("has no adapter to gate"):
        CHAT.main([str(saved / "merged"), "3 + 4?", "--gates", "1-0-0-0"])
    pushed = dataclasses.replace(find_source(str(saved / "merged")), repository="me/sums")
    assert [*CHAT.gates_by_column(pushed, None, 4)] == ["me/sums"]  # and not the commit of its snapshot


def test_chat_reads_prompts_from_piped_input(monkeypatch, capsys):
    prompts = []
    note = lambda model, tokenizer, ids, *args, **options: prompts.append(tokenizer.decode(ids[0]))
    monkeypatch.setattr(CHAT, "generate_greedy", note)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n1 + 2?\n \n\n5 + 4?"))
    CHAT.main(["tiny-ouro", "--prompt_template", "Question: {x}\nAnswer:"])
    assert prompts == ["Question: 1 + 2?\nAnswer:", "Question: 5 + 4?\nAnswer:"]
    printed = capsys.readouterr().out
    assert re.findall("> .*", printed) == ["> 1 + 2?", "> 5 + 4?"] and "Each line begins a conversation" in printed


ADDRESS = f"https://example.org/{'abcdefghij' * 12}"


def test_long_piece_of_an_answer_is_never_cut(saved, monkeypatch, capsys):
    """A terminal shows it in several lines, and a pipe as the model wrote it."""

    def answer_with_address(*args, on_text, **options):
        on_text(f"See {ADDRESS} now")

    monkeypatch.setattr(CHAT, "generate_greedy", answer_with_address)
    monkeypatch.setenv("COLUMNS", "80")
    CHAT.main([str(saved), "3 + 4?"])
    piped = capsys.readouterr().out.splitlines()
    for name in ("base model", "adapter"):
        assert piped[piped.index(f"K = 4, {name}:") + 1] == f"See {ADDRESS} now"
    monkeypatch.setattr(CHAT, "terminal_columns", lambda: 80)
    CHAT.main([str(saved), "3 + 4?"])
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if re.fullmatch(" *base model +adapter *", line))
    for column in (slice(0, 40), slice(40, 80)):
        text = "".join(line[column] for line in lines[start + 2 :])
        assert f"See{ADDRESS}now" in text.replace(" ", "")


def test_several_prompts_name_a_pipe():
    fix = "Put one prompt in quotes. Several prompts are lines of a file or a pipe, as in `loopdropout chat MODEL < FILE`."
    with user_error(f"`prompt` must have one value, got 'A\\?' 'B\\?'. {fix} Words without `--field` must come first"):
        CHAT.main(["tiny-ouro", "A?", "B?"])


@pytest.fixture
def session(monkeypatch, capsys):
    """A function from entered lines and words to the prompts and answers of a session at a terminal, and its text."""

    def enter(lines, *words):
        asked = []

        def note(model, tokenizer, ids, *args, **options):
            (text,) = generate_greedy(model, tokenizer, ids, *args, **options)
            asked.append((tokenizer.decode(ids[0]), text))
            return [text]

        entered = iter([*lines, ""])
        monkeypatch.setattr(CHAT, "generate_greedy", note)
        monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", lambda text: next(entered))
        CHAT.main([*map(str, words), "--max_new_tokens", "4"])
        return asked, capsys.readouterr().out

    return enter


def test_session_continues_each_conversation(saved, session, tmp_path):
    """The base model and the adapter have their own answers before the second question. `/new` begins again."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    words = [saved, "--chat_template", tmp_path / "chat.jinja", "--system_instruction", "Add."]
    asked, printed = session(["Hi!", "More?", "And?", "/new", "Hi!"], *words, "--eval_num_loops", "2", "4")
    first = ["[system] Add.<eos>[user] Hi!<eos>[assistant]"] * 4  # two models at two depths
    assert [prompt for prompt, _ in asked[:4]] == first and asked[12:] == asked[:4]
    turns = first
    for number, question in ((4, "More?"), (8, "And?")):
        answers = [answer for _, answer in asked[number - 4 : number]]
        turns = [
            f"{turn} {answer}<eos>[user] {question}<eos>[assistant]"
            for turn, answer in zip(turns, answers, strict=True)
        ]
        assert [prompt for prompt, _ in asked[number : number + 4]] == turns
    assert len({*turns}) == 4
    assert "Each line continues the conversation. `/new` begins another one" in printed


def test_session_of_prompts_that_are_no_chat(saved, session):
    asked, printed = session(["3 + 4?", "More?"], saved)
    assert [prompt for prompt, _ in asked[::2]] == [QUESTION, QUESTION.replace("3 + 4?", "More?")]
    assert "Each line is a prompt of its own" in printed


def test_session_goes_on_after_a_conversation_that_is_too_long(saved, session, tmp_path):
    """It stays as it was before the long line."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    asked, printed = session(["Hi!", "long " * 2000, "More?"], saved, "--chat_template", tmp_path / "chat.jinja")
    with user_error("The prompt must have fewer tokens than the context"):
        session([], saved, "long " * 2000)  # a single prompt is no session
    assert len(asked) == 4 and asked[2][0].endswith(f"{asked[0][1]}<eos>[user] More?<eos>[assistant]")
    assert "The prompt must have fewer tokens than the context" in printed


def test_chat_ends_at_an_entered_empty_line(monkeypatch):
    entered = iter(["1 + 2?", "5 + 4?", "", "9 - 1?"])
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda text: next(entered))
    assert [*CHAT.read_prompts()] == ["1 + 2?", "5 + 4?"]


def test_chat_uses_the_chat_template(saved, shown, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    folder = merge_and_save(load_model(saved), tmp_path / "model", tokenizer)
    (folder / "checksums.json").unlink()
    (folder / "loop_dropout.json").unlink()  # as of a base model, which no training gave another format
    CHAT.main([str(folder), "Hi!", "--max_new_tokens", "8"])
    assert shown["K = 4"]["model"] == answer(load_model(saved), tokenizer, "[user] Hi!<eos>[assistant]")
    CHAT.main([str(folder), "Hi!", "--max_new_tokens", "8", "--system_instruction", "Add."])
    prompt = "[system] Add.<eos>[user] Hi!<eos>[assistant]"
    assert shown["K = 4"]["model"] == answer(load_model(saved), tokenizer, prompt)
    assert "Example: '[system] Add.<eos>[user] What is 7 times 8?<eos>[assistant]'" in capsys.readouterr().out


def test_chat_names_the_prompts_that_it_leaves_out(saved, shown, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    folder = merge_and_save(load_model(saved), tmp_path / "model", tokenizer)
    (folder / "checksums.json").unlink()
    write_metadata(folder, {"is_chat": True, "system_turn": "Add."})
    hint = "The training data had the system turn 'Add.'. Add `--system_instruction` to ask with it."
    CHAT.main([str(folder), "Hi!", "--max_new_tokens", "1"])
    assert hint in capsys.readouterr().out
    write_metadata(folder, {"is_chat": True, "has_plain_texts": True, "has_system_turns": True})
    CHAT.main([str(folder), "Hi!", "--max_new_tokens", "1"])
    head = capsys.readouterr().out.splitlines()[:5]
    assert "prompts: " not in head[0] and head[1] == "Format of the prompts: the tokenizer's chat template"
    assert head[3].startswith("The training data also had plain texts, ")
    assert head[3].endswith('Add `--prompt_template "{prompt}"` to ask without it.')
    assert head[4].startswith("Some conversations of the training data had a system turn.")
    for words in (["--system_instruction", "Add."], ["--prompt_template", "Q: {x}"]):
        CHAT.main([str(folder), "Hi!", "--max_new_tokens", "1", *words])
        printed = capsys.readouterr().out
        assert "Some conversations of" not in printed
        assert ("plain texts" in printed) == (words[0] == "--system_instruction")


def test_chat_refuses_a_system_turn_that_the_training_cannot_express(saved):
    with user_error("one turn of the role user, got the roles system, user"):
        CHAT.main([str(saved), "3 + 4?", "--system_instruction", "Add."])
