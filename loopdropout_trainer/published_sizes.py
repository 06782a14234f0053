"""Published sizes of models, so that neither a plan nor a check of a base model needs a network."""

QWEN = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "ByteDance/Ouro-1.4B": {
        "model_type": "ouro", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 49152, "num_hidden_layers": 24, "total_ut_steps": 4,
    },
    "ByteDance/Ouro-2.6B": {
        "model_type": "ouro", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 49152, "num_hidden_layers": 48, "total_ut_steps": 4,
    },
    "tomg-group-umd/huginn-0125": {
        "model_type": "huginn_raven", "n_embd": 5280, "n_heads": 55, "intermediate_size": 17920, "vocab_size": 65536,
        "padded_vocab_size": 65536, "tie_embeddings": True, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4,
        "n_layers_in_coda": 2, "mean_recurrence": 32, "block_size": 4096,
    },
    "Nanbeige/Nanbeige4.2-3B": {
        "model_type": "nanbeige", "hidden_size": 3072, "intermediate_size": 10752, "num_hidden_layers": 22,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 166144, "num_loops": 2,
    },
    "nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16": {
        "model_type": "dory", "hidden_size": 2560, "intermediate_size": 7168, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 131072, "n_input_layers": 16, "n_recurrent_layers": 40,
        "n_output_layers": 16, "n_recurrent_loops": 2,
    },
    "Thrillcrazyer/Qwen3-4B_LoopUS": {
        "model_type": "lds", "base_config_dict": QWEN, "hidden_size": 2560, "encoder_layer_indices": [0, 1],
        "reasoning_layer_indices": [*range(2, 34)], "decoder_layer_indices": [34, 35], "N": 8,
    },
}  # fmt: skip
"""Published fields by the name of the model, and for LoopUS the split of the layers that its 260 layer runs suggest."""

PUBLISHED["Nanbeige/Nanbeige4.2-3B-Base"] = PUBLISHED["Nanbeige/Nanbeige4.2-3B"]
