"""tools/model_bench.py: its decoder is Qwen3's, compiled and step by step too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.child import ROOT, run_child

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

import fp4linear.torch  # noqa: E402


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "model_bench", raising=False)
    import model_bench

    return model_bench


def made(bench: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return bench.Decoder(bench.SMALL, 64, **options).eval().requires_grad_(False)


def prompt_and_steps(model: Any, tokens: Any) -> list[Any]:
    """Logits after all but the last four tokens and after each of those, which decode steps take."""
    prompt = tokens.shape[1] - 4
    caches, position = model.caches(len(tokens), tokens.shape[1] + 3), torch.tensor([prompt])
    seen = [model(tokens[:, :prompt], caches, None)]
    for i in range(prompt, tokens.shape[1]):
        seen.append(model(tokens[:, i : i + 1], caches, position))
        position += 1
    for logits, token in seen:
        assert torch.equal(logits.argmax(-1), token)
    return [logits[:, -1] for logits, _ in seen]


def close(logits: Any, wanted: Any, relative: float = 1e-5) -> bool:
    return bool((logits - wanted).abs().max() < relative * max(1.0, float(wanted.abs().max())))


def tokens_of(bench: Any) -> Any:
    return torch.randint(0, bench.SMALL.vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("separate, quantized", [(False, False), (True, False), (False, True)])
def test_compiled_steps_give_the_logits_of_whole_prompts(bench: Any, separate: bool, quantized: bool) -> None:
    torch.compiler.reset()
    eager, compiled = (made(bench, separate=separate, compiled=compiled) for compiled in (False, True))
    # How an NVFP4 layer sums depends on the number of rows.
    relative = 1e-3 if quantized else 1e-5
    for model in (eager, compiled) if quantized else ():
        fp4linear.torch.quantize_model(model, exclude=(), progress=False)
    tokens = tokens_of(bench)
    steps, compiled_steps = prompt_and_steps(eager, tokens), prompt_and_steps(compiled, tokens)
    for i, (step, other) in enumerate(zip(steps, compiled_steps, strict=True)):
        whole = tokens[:, : tokens.shape[1] - 4 + i]
        wanted = eager(whole, eager.caches(*whole.shape), None)[0][:, -1]
        assert close(step, wanted, relative) and close(other, wanted, relative)
    assert not close(steps[0], steps[1], 10 * relative)


@torch.no_grad()
def test_the_decoder_is_that_of_transformers(bench: Any) -> None:
    transformers = pytest.importorskip("transformers")
    s = bench.SMALL
    config = transformers.Qwen3Config(
        vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, tie_word_embeddings=False,
        rms_norm_eps=s.eps, rope_parameters={"rope_type": "default", "rope_theta": s.theta},
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    ours = made(bench, separate=True, compiled=False)
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.add_(torch.rand_like(parameter))
    ours.embedding, ours.head, ours.norm = theirs.model.embed_tokens, theirs.lm_head, theirs.model.norm.weight
    for mine, other in zip(ours.layers, theirs.model.layers, strict=True):
        attention, mlp = other.self_attn, other.mlp
        mine.qkv = torch.nn.ModuleList([attention.q_proj, attention.k_proj, attention.v_proj])
        mine.o, mine.down = attention.o_proj, mlp.down_proj
        mine.gate_up = torch.nn.ModuleList([mlp.gate_proj, mlp.up_proj])
        mine.norm, mine.second_norm = other.input_layernorm.weight, other.post_attention_layernorm.weight
        norms = [attention.q_norm.weight] * s.heads + [attention.k_norm.weight] * 2 * s.kv_heads
        mine.head_norms = torch.nn.Parameter(torch.stack(norms))
    tokens = tokens_of(bench)
    wanted = theirs(tokens).logits
    for i, logits in enumerate(prompt_and_steps(ours, tokens)):
        assert close(logits, wanted[:, tokens.shape[1] - 5 + i])


def test_it_runs() -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tools")!r})
        import model_bench
        model_bench.main("--small --prompt 24 --context 8 --tokens 16 --batch 1,2 --profile".split())
    """
    lines = run_child(code, timeout=600).stdout.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    assert [result.pop("model") for result in results] == ["bf16", "nvfp4"]
    assert all(value > 0 for result in results for value in result.values())
    assert sum(" gaps " in line for line in lines) == 4
    assert any("linear" in line and "fp4linear::linear" in line for line in lines)


def test_every_kernel_has_a_group(bench: Any) -> None:
    names = {
        "void fp4linear::cuda::(anonymous namespace)::gemv_kernel<fp4linear::cuda::BFloat16>": "linear",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "linear",
        "void cublasLt::splitKreduce_kernel<32, 16, int>": "linear",
        "triton_red_fused__to_copy_mul_slice_sum_unsqueeze_view_3": "attention",
        "triton_per_fused__softmax_arange_div_le_where_4": "attention",
        "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>": "attention",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "other",
        "triton_poi_fused_mul_silu_split_8": "other",
    }
    assert {name: bench.group_of(name) for name in names} == names
