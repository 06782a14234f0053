"""The small server: its texts, its errors, its places, and its names for depths and gates, over HTTP."""

import asyncio
import gc
import json
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import openai
import psutil
import pytest
import torch

from helpers.errors import user_error
from helpers.processes import Program, wait_for
from helpers.tiny import tiny_hrm, varied, with_adapter
from loopdropout_trainer import load_model, use_gates
from loopdropout_trainer.gates import make_rule
from loopdropout_trainer.generation import Ending, SlotLayer, generate_greedy
from loopdropout_trainer.looped import find_looped_model, use_depth
from loopdropout_trainer.lora import add_gates
from loopdropout_trainer.saving.metadata import write_metadata
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.serving.address import open_socket
from loopdropout_trainer.serving.scheduler import Completion, Result, Sampling, Scheduler
from loopdropout_trainer.serving.streams import TextStream
from loopdropout_trainer.serving.variants import ModelNames, UnknownModelError, Variant
from loopdropout_trainer.tokenizers import load_tokenizer


app = pytest.importorskip("loopdropout_trainer.serving.app")  # needs FastAPI
QUESTION = "Tom has 3 boxes with 6 pens each. How many pens does Tom have?"
PROMPTS = [f"Tom has {number} boxes with 6 pens each. How many pens does Tom have?\n" for number in range(2, 8)]
KEY = "secret-of-the-tests"
START = """
import sys
from dataclasses import replace
from loopdropout_trainer.saving.loading import load
from loopdropout_trainer.saving.source import find_source
from loopdropout_trainer.serving.address import open_socket
from loopdropout_trainer.serving.app import Server, serve
folder, key = sys.argv[1:]
source = replace(find_source(folder), name="run")
prompt_format = source.choose_prompt_format(source.load_tokenizer())
server = Server(source, load(source), prompt_format, batch_size=8)
listener = open_socket("127.0.0.1", 0)
print("port", listener.getsockname()[1], flush=True)
serve(server, listener, key)
"""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The folder of an adapter of `tiny-ouro`, and the loaded model."""
    folder = tmp_path_factory.mktemp("served") / "run"
    torch.manual_seed(0)
    with_adapter(load_model("tiny-ouro"), scale=0.1).save_pretrained(folder)
    write_metadata(folder, {"prompt_template": "Question: {question}\nAnswer:"})
    return folder, load_model(folder)


@pytest.fixture(scope="module")
def ouro_tokenizer():
    return load_tokenizer("tiny-ouro")


@pytest.fixture(scope="module")
def server(adapted):
    """A process that serves the adapter, and a client."""
    program = Program("-c", START, adapted[0], KEY)
    port = int(wait_for(lambda: program.stdout.partition("port ")[2], program))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    yield client
    program.end()


@pytest.fixture(autouse=True)
def no_program_outlives_its_test():
    """Let the server outlive the tests of this module."""


ENDLESS = "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
ENDLESS += "{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"


def test_endless_template_ends_in_a_sentence(tmp_path):
    """A stranger's template that does not end for one conversation stops neither the server nor its memory."""
    tokenizer = load_tokenizer("tiny-ouro")
    tokenizer.chat_template = ENDLESS
    load_model("tiny-ouro").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bound = "from loopdropout_trainer import limits\nlimits.RENDER_SECONDS = 1\n"
    program = Program("-c", bound + START, tmp_path, KEY)
    port = int(wait_for(lambda: program.stdout.partition("port ")[2], program))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    chat = partial(client.chat.completions.create, model="run", max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="`chat_template` .* more than 1 seconds"):
        chat(messages=[{"role": "user", "content": "loop"}])
    assert chat(messages=[{"role": "user", "content": "Hi"}]).choices[0].finish_reason == "length"
    program.end()


def expected(adapted, ouro_tokenizer, prompts, num_loops=4, gates=None, max_tokens=12, stops=()):
    model = adapted[1]
    with use_depth(model, num_loops), use_gates(model, gates or [1] * num_loops):
        return generate_greedy(model, ouro_tokenizer, prompts, max_tokens, stop_strings=stops, progress=False)


def complete(client, prompt, model="run", **options):
    return client.completions.create(model=model, prompt=prompt, **{"max_tokens": 12, "temperature": 0, **options})


def health(client):
    return client.get("/../health", cast_to=object)


@pytest.mark.parametrize(
    ("name", "num_loops", "gates"),
    [
        ("run", 4, None),
        ("run@K=6", 6, None),
        ("run@gates=1-0-0-0.5", 4, [1, 0, 0, 0.5]),
        ("run@K=2,gates=0-1", 2, [0, 1]),
    ],
)
def test_texts_equal_generate(server, adapted, ouro_tokenizer, name, num_loops, gates):
    want = expected(adapted, ouro_tokenizer, PROMPTS, num_loops, gates)
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(lambda prompt: complete(server, prompt, name).choices[0].text, PROMPTS))
    assert answers == want
    together = complete(server, [ouro_tokenizer(prompt)["input_ids"] for prompt in PROMPTS], name)
    assert [choice.text for choice in together.choices] == want
    pieces = list(complete(server, PROMPTS[0], name, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == want[0]
    assert pieces[-2].choices[0].finish_reason in ("stop", "length")
    assert pieces[-1].usage.prompt_tokens == len(ouro_tokenizer(PROMPTS[0])["input_ids"])


def test_depths_and_gates_differ(adapted, ouro_tokenizer):
    texts = {
        expected(adapted, ouro_tokenizer, [QUESTION], *variant)[0]
        for variant in [(4,), (6,), (1,), (4, [1, 0, 0, 0.5])]
    }
    assert len(texts) > 2


def test_conversation_has_the_training_format(server, adapted, ouro_tokenizer):
    (want,) = expected(adapted, ouro_tokenizer, [f"Question: {QUESTION}\nAnswer:"])
    chat = lambda *messages, **options: server.chat.completions.create(
        model="run", messages=[*messages], **{"max_tokens": 12, "temperature": 0, **options}
    )
    question = {"role": "user", "content": QUESTION}
    answer = chat(question)
    assert answer.choices[0].message.content == want
    assert answer.choices[0].message.role == "assistant"
    pieces = list(chat(question, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == want
    parts = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    assert chat(parts, max_tokens=openai.omit, max_completion_tokens=12).choices[0].message.content == want
    for turns in (
        [{"role": "system", "content": "a"}, question],
        [question, {**question, "role": "assistant"}, question],
    ):
        with pytest.raises(openai.BadRequestError, match="must be one turn of the role user, got the roles"):
            chat(*turns)


def test_stop_string_is_not_in_the_text(server, adapted, ouro_tokenizer):
    (whole,) = expected(adapted, ouro_tokenizer, PROMPTS[:1])
    stop = whole[3:6]
    answer = complete(server, PROMPTS[0], stop=stop).choices[0]
    assert (answer.text, answer.finish_reason) == (whole.split(stop)[0], "stop")
    assert (
        "".join(piece.choices[0].text for piece in complete(server, PROMPTS[0], stop=[stop, "?"], stream=True))
        == answer.text
    )


def test_seed_repeats_a_drawn_text(server):
    draw = lambda seed, **options: complete(server, QUESTION, seed=seed, temperature=2.0, **options).choices[0].text
    with ThreadPoolExecutor(4) as clients:
        texts = list(clients.map(draw, [1, 2, 3, 1]))
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    assert draw(1, top_p=1e-6) == complete(server, QUESTION).choices[0].text


WRONG = {
    "stop": (5, "a text or a list of texts, none of them empty, got 5"),
    "max_tokens": (0, "an integer of at least 1, got 0"),
    "temperature": ("hot", "a finite number of at least 0, got 'hot'"),
    "top_p": (0, "above 0 and at most 1"),
    "seed": (2**63, "64 bits"),
    "stream": ("yes", "true or false"),
    "stream_options": ({"include_usage": True}, "left out unless `stream` is true"),
    "prompt": ([614], "token ids below 614, got 614"),
    "model": ("run@K=0", "an integer from 1 to 1,024"),
}


@pytest.mark.parametrize("field", WRONG)
def test_wrong_value_is_named(server, field):
    value, message = WRONG[field]
    with pytest.raises(openai.BadRequestError, match=message) as error:
        complete(server, prompt="a", extra_body={field: value})
    assert "`" in error.value.body["message"]


UNSUPPORTED = {
    "n": 2,
    "best_of": 3,
    "logprobs": 1,
    "echo": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 1,
    "suffix": "a",
    "response_format": {"type": "json_object"},
    "tools": [{}],
    "tool_choice": "auto",
    "logit_bias": {"5": 1},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "guided_json": {},
    "chat_template_kwargs": {"a": 1},
}


def test_fields_without_effect_are_named(server):
    with pytest.raises(openai.BadRequestError) as error:
        complete(server, "a", extra_body=UNSUPPORTED)
    message = error.value.body["message"]
    assert all(f"`{name}`" in message for name in UNSUPPORTED) and "Leave them out" in message
    with pytest.raises(openai.BadRequestError, match="does not support `n`. Leave it out, or use vLLM"):
        complete(server, "a", n=2)
    neutral = {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "presence_penalty": 0, "tools": [], "user": "me"}
    assert complete(server, "a", extra_body=neutral).choices[0].text


def test_request_must_fit_into_the_context(server, ouro_tokenizer):
    num_tokens = len(ouro_tokenizer(QUESTION)["input_ids"])
    with pytest.raises(
        openai.BadRequestError, match=f"`max_tokens` must be at most {512 - num_tokens}, because the context"
    ):
        complete(server, QUESTION, max_tokens=513 - num_tokens)
    with pytest.raises(openai.BadRequestError, match="fewer tokens than the context of the model, 512, got 512"):
        complete(server, [5] * 512, max_tokens=1)
    assert complete(server, [5] * 511, max_tokens=openai.omit).usage.completion_tokens == 1


@pytest.mark.parametrize(
    "body", ["{}", "[]", "not json", '{"model": "run", "messages": []}', '{"model": "run", "messages": [5]}']
)
def test_malformed_body_is_an_error(server, body):
    address = server.base_url.copy_with(path="/v1/chat/completions")
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = server._client.post(address, content=body, headers=headers)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_only_documented_endpoints_are_open(server):
    for path in ("/docs", "/openapi.json", "/v1/responses", "/load_model", "/v1/audio/transcriptions"):
        with pytest.raises(openai.NotFoundError, match="is not an endpoint of this server"):
            server.post(f"/..{path}", cast_to=object, body={})


def test_key_is_required(server):
    with pytest.raises(openai.AuthenticationError, match="API key of this server"):
        server.with_options(api_key="other").models.list()
    answer = server._client.get(server.base_url.copy_with(path="/health"))
    assert answer.json() == {"status": "ok", "running": 0, "waiting": 0}


def test_names_are_listed(server):
    names = [model.id for model in server.models.list()]
    assert names[:4] == ["run", "run@K=1", "run@K=2", "run@K=4"]
    assert {"run@K=8", "run@gates=1-0-0-0", "run@gates=0-0-0-0"} <= {*names}
    assert server.models.retrieve("run@K=3").id == "run@K=3"
    for name in ("other", "run@", "run@k=2", "run@K=2,", "run@gates="):
        with pytest.raises(openai.NotFoundError, match="`model` must be run, run@K=8, run@gates=1-0-0-0"):
            complete(server, "a", name)
    with pytest.raises(openai.BadRequestError, match="one number for each loop"):
        complete(server, "a", "run@gates=1-0")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_place(server, stream):
    leavers = [socket.create_connection((server.base_url.host, server.base_url.port)) for _ in range(12)]
    body = json.dumps({"model": "run@K=64", "prompt": "a", "max_tokens": 500, "temperature": 0, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    for leaver in leavers:
        leaver.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_for(lambda: health(server)["running"] == 8 and health(server)["waiting"] == 4)
    for leaver in leavers:
        leaver.close()
    began = time.monotonic()
    wait_for(lambda: health(server) == {"status": "ok", "running": 0, "waiting": 0})
    assert time.monotonic() - began < 5  # less than a second on a quiet machine, and minutes without


@pytest.mark.slow
def test_memory_stays(server, adapted):
    def run(number):
        with ThreadPoolExecutor(8) as clients, suppress(openai.BadRequestError):
            list(
                clients.map(
                    lambda index: complete(server, PROMPTS[index % 6], max_tokens=1 + index % 90), range(number)
                )
            )

    (connection,) = [
        c for c in psutil.net_connections() if c.laddr.port == server.base_url.port and c.status == "LISTEN"
    ]
    process = psutil.Process(connection.pid)
    run(40)
    before = process.memory_info().rss
    run(400)
    assert process.memory_info().rss < 1.05 * before


def test_connections_do_not_wait_for_confirmations():
    with open_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# The parts, without HTTP


async def post(application, path, body):
    """Post a body to an application, and return the bytes of the answer."""
    messages, parts = [{"type": "http.request", "body": json.dumps(body).encode()}], []

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()  # the client stays

    async def send(message):
        parts.append(message.get("body", b""))

    head = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
    await application({**head, "query_string": b""}, receive, send)
    return b"".join(parts)


@pytest.mark.parametrize("stream", [False, True])
def test_ended_requests_leave_no_garbage(adapted, stream):
    source = replace(find_source(adapted[0]), name="run")
    server = app.Server(source, adapted[1], source.choose_prompt_format(source.load_tokenizer()))
    body = {"model": "run", "prompt": "a", "max_tokens": 3, "stream": stream}
    alive = lambda: [kept for kept in gc.get_objects() if isinstance(kept, app.Exchange | Completion | SlotLayer)]
    gc.collect()
    gc.disable()  # it comes late, after the memory of many caches
    try:
        assert b"finish_reason" in asyncio.run(post(app.make_app(server), "/v1/completions", body))
        server.scheduler.stop()
        assert alive() == []
    finally:
        gc.enable()


def decode(scheduler, model, tokenizer, prompts, max_tokens=12, **options):
    """Return the events of completions, in the order of the prompts."""
    events = [queue.Queue() for _ in prompts]
    completions = [
        Completion(
            tokenizer(prompt)["input_ids"],
            options.get("variant", Variant(4)),
            max_tokens,
            options.get("sampling", Sampling()),
            Ending(model, tokenizer, []),
            None,
            own.put,
        )
        for prompt, own in zip(prompts, events, strict=True)
    ]
    scheduler.add(completions)
    return completions, [own.get(timeout=100) for own in events]


def test_completions_run_together(adapted, ouro_tokenizer):
    model, passes = adapted[1], []
    hook = model.base_model.model.model.register_forward_hook(lambda *arguments: passes.append(1))
    scheduler = Scheduler(model, batch_size=32)
    try:
        _, results = decode(scheduler, model.base_model.model, ouro_tokenizer, PROMPTS * 3)
    finally:
        hook.remove()
        scheduler.stop()
    assert [result.text for result in results] == expected(adapted, ouro_tokenizer, PROMPTS) * 3
    assert len(passes) <= 13


def test_model_without_slots_answers_as_generate(tokenizer):
    model = varied(tiny_hrm())
    scheduler, depth = Scheduler(model, batch_size=4), Variant(find_looped_model(model).num_loops)
    _, results = decode(scheduler, model, tokenizer, PROMPTS, variant=depth)
    drawn = [
        decode(scheduler, model, tokenizer, PROMPTS[:2], variant=depth, sampling=Sampling(3.0, 0.9, seed))[1]
        for seed in (1, 2, 1)
    ]
    scheduler.stop()
    assert [result.text for result in results] == generate_greedy(model, tokenizer, PROMPTS, 12, progress=False)
    assert drawn[0] == drawn[2] != drawn[1]


def test_error_ends_a_batch_and_not_the_server(adapted, ouro_tokenizer):
    model = adapted[1]
    scheduler = Scheduler(model, batch_size=4)
    _, (error,) = decode(scheduler, model.base_model.model, ouro_tokenizer, ["a"], variant=Variant(4, (1.0, 1.0)))
    assert isinstance(error, RuntimeError)
    _, (result,) = decode(scheduler, model.base_model.model, ouro_tokenizer, PROMPTS[:1])
    assert isinstance(result, Result)
    scheduler.stop()


def test_one_depth_adapter_has_its_own_depth_only(tmp_path):
    model = with_adapter(load_model("tiny-ouro"))
    add_gates(model, rule=make_rule("independent"))
    model.save_pretrained(tmp_path)
    names = ModelNames(replace(find_source(tmp_path), name="run"), 4)
    assert not any("K=" in name for name in names.listed())
    with user_error("`num_loops` must be 4 for run, .* parameters for each loop, got 8"):
        names.find("run@K=8")
    base = ModelNames(find_source("tiny-ouro"), 4)
    with user_error("no adapter to gate"):
        base.find("tiny-ouro@gates=1-0-0-0")
    for name in ("run", "tiny-ouroK=2", "K=2"):
        with pytest.raises(UnknownModelError):
            base.find(name)


def test_pieces_hold_back_half_characters_and_stop_strings(ouro_tokenizer):
    text = "aä€😀b <end> rest"
    tokens = ouro_tokenizer(text)["input_ids"]
    stream = TextStream(ouro_tokenizer, ["<end>"])
    pieces, sent = [], ""
    for token in tokens:
        pieces.append(stream.push(token))
        sent += pieces[-1]
        if "<" in sent:
            break
        assert text.startswith(sent)
        assert not sent.endswith(("<", "<e", "<en"))
    assert stream.finish(text) == text[len(sent) :]
    assert max(map(len, pieces[:-1])) == 1
