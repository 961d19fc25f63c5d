"""The model card reads a published config and refuses what is not Kimi K3."""

import copy
import dataclasses
import json

import pytest
from k3lab.kernels import K3, SMALL_K3, InputError, ModelCard


def published(card: ModelCard) -> dict:
    """A config.json in the published form, from a card."""
    mla = [layer + 1 for layer in card.mla_layers]
    text = {
        "model_type": "kimi_linear", "hidden_act": "situ", "tie_word_embeddings": False, "mla_use_nope": True,
        "vocab_size": card.vocab_size, "hidden_size": card.hidden_size, "num_hidden_layers": card.num_hidden_layers,
        "num_attention_heads": card.num_attention_heads, "intermediate_size": card.intermediate_size,
        "first_k_dense_replace": card.first_k_dense, "q_lora_rank": card.q_lora_rank, "kv_lora_rank": card.kv_lora_rank,
        "qk_nope_head_dim": card.qk_nope_head_dim, "qk_rope_head_dim": card.qk_rope_head_dim, "v_head_dim": card.v_head_dim,
        "num_experts": card.num_experts, "num_experts_per_token": card.num_experts_per_token,
        "num_shared_experts": card.num_shared_experts, "moe_intermediate_size": card.moe_intermediate_size,
        "routed_expert_hidden_size": card.routed_expert_hidden_size, "routed_scaling_factor": card.routed_scaling_factor,
        "activation_situ_beta": card.situ_beta, "activation_situ_linear_beta": card.situ_linear_beta,
        "attn_res_block_size": card.attn_res_block_size, "rms_norm_eps": card.rms_norm_eps,
        "max_position_embeddings": card.max_position_embeddings, "bos_token_id": card.bos_token_id,
        "eos_token_id": card.eos_token_id, "pad_token_id": card.pad_token_id,
        "linear_attn_config": {
            "num_heads": card.kda_num_heads, "head_dim": card.kda_head_dim, "short_conv_kernel_size": card.kda_conv_size,
            "gate_lower_bound": card.kda_gate_lower_bound, "full_attn_layers": mla,
            "kda_layers": [layer for layer in range(1, card.num_hidden_layers + 1) if layer not in mla],
        },
        "quantization_config": {"config_groups": {"group_0": {"weights": {"group_size": card.mxfp4_group_size}}}},
    }  # fmt: skip
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def test_k3_has_the_published_structure():
    assert K3.layer_kinds.count("kda") == 69
    assert K3.layer_kinds.count("mla") == 24
    assert K3.layer_kinds[:4] == ("kda", "kda", "kda", "mla")
    assert K3.layer_kinds[-2:] == ("mla", "mla")
    assert (K3.kda_dim, K3.mla_dim, K3.shared_intermediate_size, K3.num_attn_res_blocks) == (12288, 12288, 6144, 8)
    assert [layer for layer in range(93) if K3.starts_block(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]


@pytest.mark.parametrize("card", [K3, SMALL_K3], ids=lambda card: card.name)
def test_a_published_config_gives_the_card(card, tmp_path):
    path = tmp_path / f"{card.name}.json"
    path.write_text(json.dumps(published(card)))
    assert ModelCard.from_file(path) == card


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "7168"}, "not the type"),
        ({"model_type": "llama"}, "kimi_linear"),
        ({"hidden_act": "silu"}, "'situ'"),
        ({"num_hidden_layers": 92}, "do not cover 1..92"),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(change, says):
    config = published(K3)
    for key, value in change.items():
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    with pytest.raises(InputError, match=says) as caught:
        ModelCard.from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tp", [0, 3, 7, 12, 64])
def test_tp_must_divide(tp):
    with pytest.raises(InputError, match="TP sizes that do: 1, 2, 4, 8, 16"):
        K3.check_tp(tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_both_cards_divide_by_the_sizes_in_use(tp):
    K3.check_tp(tp)
    SMALL_K3.check_tp(tp)


def test_nonsense_cards_are_refused():
    with pytest.raises(InputError, match="more experts per token"):
        dataclasses.replace(K3, num_experts=8)
    with pytest.raises(InputError, match="outside"):
        dataclasses.replace(K3, mla_layers=(93,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 0), ("kda_head_dim", -1), ("attn_res_block_size", 0), ("num_experts_per_token", 0),
        ("hidden_size", 10**30), ("first_k_dense", 94), ("rms_norm_eps", 0.0), ("situ_beta", float("nan")),
        ("routed_scaling_factor", float("inf")), ("kda_gate_lower_bound", 0.0), ("mxfp4_group_size", 16),
        ("moe_intermediate_size", 3080),
    ],
)  # fmt: skip
def test_sizes_no_model_can_have_are_refused(field, value):
    with pytest.raises(InputError, match=field):
        dataclasses.replace(K3, **{field: value})


ODD = [None, True, -1, 0, 1.5, float("nan"), 10**400, "x", [], {}, [None], {"a": 1}]


def test_odd_values_anywhere_in_a_config_are_one_line():
    def places(tree, path=()):
        for key in tree:
            yield (*path, key)
            if isinstance(tree[key], dict):
                yield from places(tree[key], (*path, key))

    config = published(K3) | {"bos_token_id": 1}
    config["text_config"]["quantization_config"] = {"config_groups": {"group_0": {"weights": {"group_size": 32}}}}
    refused = []
    for place in list(places(config)):
        for odd in ODD:
            changed = copy.deepcopy(config)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = odd
            try:
                ModelCard.from_config(changed)
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 400
    assert not [line for line in refused if "\n" in line]


def test_json_nested_too_deep_is_one_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    with pytest.raises(InputError, match="not JSON"):
        ModelCard.from_file(path)
