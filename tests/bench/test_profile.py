"""The profile of a step: every kernel has a kind, and what no kernel fills is a gap."""

from __future__ import annotations

import pytest
import torch

from bench import profile, train
from bench.profile import Span, busy, groups, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "products"),
        ("triton_tem_fused_mm_0", "products"),
        ("aten::addmm", "products"),
        ("aten::mm", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_backward_1", "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::cross_entropy_loss", "loss"),
        ("triton_red_fused__to_copy_amax_arange_eq_exp_log_masked_fill_sub_sum_where_9", "loss"),  # trivium's own
        ("triton_red_fused__to_copy_arange_bitwise_not_div_eq_exp_lt_prepare_softmax_online_3", "loss"),
        ("loss_kernel", "loss"),
        ("keys_kernel", "attention"),  # trivium's own too
        ("unbend_kernel", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("triton_poi_fused__to_copy_5", "copies"),
        ("aten::copy_", "copies"),
        ("triton_poi_fused_gelu_7", "elementwise"),
        ("triton_per_fused_native_layer_norm_2", "elementwise"),
        ("aten::gelu_backward", "elementwise"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_without_a_kernel_is_a_gap_and_overlaps_count_once() -> None:
    spans = [Span("aten::mm", "products", 0, 4), Span("aten::mm", "products", 2, 4), Span("gelu", "elementwise", 8, 1)]
    assert busy(spans) == 7
    found = {group.kind: group for group in groups(spans, 10)}
    assert found["products"].microseconds == 8
    assert (found["products"].launches, found["products"].heaviest) == (2, "aten::mm")
    assert found["elementwise"].microseconds == 1
    assert found["gaps"].microseconds == 3


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_step_of_every_family_is_profiled(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile.main(f"--device cpu --tiny --threads 1 --workload {name} --steps 2 --top 3".split())
    lines = capsys.readouterr().out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("kind"))
    shares = {line.split()[0]: float(line.split()[2].rstrip("%")) for line in lines[first + 1 : first + 8]}
    assert set(shares) == set(profile.ORDER)
    assert sum(shares.values()) == pytest.approx(100, abs=3)
    assert shares["products"] > 0
    assert shares["loss"] > 0
    assert lines[0].startswith(f"trivium, {name}")


def test_a_softmax_inside_a_loss_is_the_loss() -> None:
    scores = torch.randn(64, 128, requires_grad=True)
    labels = torch.zeros(64, dtype=torch.long)

    def run(number: int) -> float:
        torch.nn.functional.cross_entropy(scores, labels)
        torch.softmax(scores, dim=-1)
        return 0.0

    spans, _ = profile.recorded(train.Side(run, 0.0), 1, torch.device("cpu"))
    assert {span.kind for span in spans if "log_softmax" in span.name} == {"loss"}
    assert {span.kind for span in spans if span.name == "aten::_softmax"} == {"attention"}
