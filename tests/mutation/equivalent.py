"""Mutants that no test need notice, each with the reason: by module, then by function and changed source text."""

from __future__ import annotations

Reasons = dict[tuple[str, str], str]

ALIAS = "A name for a type, which only annotations use."
LAST = "The tensor has two dimensions, so that 1 is the last one as -1 is."
KERNEL = "Runs with Triton alone, where tests/kernels/test_rank.py compares it with the sort."
TRITON = (
    "Without Triton the answer is False, whatever the tensor; with it this chooses between two ways to the same ids."
)
PROBE = "Another probe of the kernel that is as good: all three filters are still asked for in some row."
WAYS = "Chooses between two ways to the same ids, of which one is faster."

SPIKES: Reasons = {
    ("past", "first < cursor + rows and cursor <= end"): "At `cursor == end` the cursor is set to what it is.",
}

ROLLBACK: Reasons = {}

BUCKETING: Reasons = {
    ("", "delete Sizes = npt.NDArray[np.int64]"): ALIAS,
    ("Pairs.__init__", "sizes.min(initial=3)"): "The least size of no pair at all, which is not below 2 either way.",
    ("Pairs.__init__", "sizes.reshape(-2, 2)"): "numpy takes every negative size for the one to be found.",
    ("Buckets.__init__", "Order(len(self), 2, seed, source=1)"): "`batch` takes the first number of what it is given.",
    ("Buckets.__init__", "(-2, np.empty(0, np.int64))"): "No epoch has this number either.",
    ("Buckets.__init__", "np.empty(1, np.int64)"): "Never read: no epoch has the number beside it.",
    ("Buckets.like", "sizes.max(initial=1)"): "A side has at least 2 tokens, and without a pair the call is refused.",
    ("Buckets._arranged", "delete self._epoch = epoch"): "The same pairs, arranged anew for every batch.",
    ("_places", "longest_N / align"): "Widths are multiples of `align`, so that the quotient is whole.",
    ("_places", "3 * longest_N + ((widths_N2[:, 0] > widths_N2[:, 1]) ^ turned_N)"): (
        "Places are compared only, and 0 or 1 is less than 3 as it is less than 2."
    ),
    ("balanced", "range(least, tokens + 2)"): "The budget `tokens` is enough, so that no larger one is chosen.",
}

RANKED = "ranked(logits_BV, *(logits_BV.new_full((len(logits_BV),), value) for value in asked))"
INSIDE = "pieces_BNK.gather(1, piece_B1[..., None].expand(-1, -1, _PIECE))[:, 0].to(wide)"
SAMPLING: Reasons = {
    ("penalise", "torch.where(logits_BV >= 0, logits_BV / penalty, logits_BV * penalty)"): "0 is 0 both ways.",
    ("keep_top_k", "0 < k <= logits_BV.shape[-1]"): "The least of all logits is below none of them.",
    ("by_kernel", "logits_BV.dtype != torch.float32"): TRITON,
    ("_proven", "torch.randn(3, 501, generator=torch.Generator().manual_seed(0))"): PROBE,
    ("_proven", "torch.Generator().manual_seed(1)"): PROBE,
    ("_proven", "torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).mul(4)"): PROBE,
    ("_proven", "((21, 0.9, 0.01), (0, 0.5, 0.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 1.9, 0.01), (0, 0.5, 0.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 1.01), (0, 0.5, 0.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (1, 0.5, 0.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (0, 1.5, 0.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (0, 0.5, 1.0), (7, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (0, 0.5, 0.0), (8, 1.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (0, 0.5, 0.0), (7, 2.0, 0.05))"): PROBE,
    ("_proven", "((20, 0.9, 0.01), (0, 0.5, 0.0), (7, 1.0, 1.05))"): PROBE,
    ("_proven", "zip(logits_BV[:, None], asked, strict=False)"): "Both have three rows.",
    ("distribution", "delete if (sampling.top_k or sampling.top_p < 1) and by_kernel(logits_BV):"): WAYS,
    ("distribution", "sampling.top_k and sampling.top_p < 1"): WAYS,
    ("distribution", "sampling.top_p <= 1"): WAYS,
    ("distribution", "sampling.top_p < 2"): WAYS,
    ("distribution", "delete least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf"): KERNEL,
    ("distribution", "sampling.min_p >= 0"): KERNEL,
    ("distribution", "sampling.min_p > 1"): KERNEL,
    ("distribution", "math.log(sampling.min_p) if sampling.min_p > 0 else math.inf"): KERNEL,
    ("distribution", "delete asked = (min(sampling.top_k, logits_BV.shape[-1]), sampling.top_p, least)"): KERNEL,
    ("distribution", "max(sampling.top_k, logits_BV.shape[-1])"): KERNEL,
    ("distribution", "logits_BV.shape[1] (2)"): LAST,
    ("distribution", "logits_BV.shape[-2] (2)"): KERNEL,
    ("distribution", f"None for return {RANKED}.softmax(-1)"): KERNEL,
    ("distribution", f"{RANKED}.softmax(1)"): LAST,
    ("distribution", f"{RANKED}.softmax(-2)"): KERNEL,
    ("", "_PIECE, _MANY = (257, 1 << 16)"): "Pieces of any size give the same sums; this size is fast.",
    ("", "_PIECE, _MANY = (256, 2 << 16)"): WAYS,
    ("", "_PIECE, _MANY = (256, 1 >> 16)"): WAYS,
    ("", "_PIECE, _MANY = (256, 1 << 17)"): WAYS,
    ("draw", "delete if probabilities_BV.device.type == 'cpu' and rows * vocab < _MANY:"): WAYS,
    ("draw", "probabilities_BV.device.type == 'cpu' or rows * vocab < _MANY"): WAYS,
    ("draw", "probabilities_BV.device.type != 'cpu'"): WAYS,
    ("draw", "rows / vocab < _MANY"): WAYS,
    ("draw", "rows * vocab <= _MANY"): WAYS,
    ("draw", "probabilities_BV.to(wide).cumsum(1)"): LAST,
    ("draw", "_passing(total_BV, uniform_B1 * total_BV[:, -1:]).squeeze(1)"): LAST,
    ("draw", "pieces_BNK.sum(-1, dtype=wide).cumsum(1)"): LAST,
    ("draw", "F.pad(total_BN, (1, 1))"): "One more column, behind all that are read.",
    ("draw", "piece_B1[..., None].expand(-1, 1, _PIECE)"): "The size is 1 already.",
    ("draw", f"{INSIDE}.cumsum(1)"): LAST,
    ("draw", "(piece_B1 * _PIECE + _passing(inside_BK, target_B1 - before_B1)).squeeze(1)"): LAST,
}

EQUIVALENT: dict[str, Reasons] = {
    "trivium.training.spikes": SPIKES,
    "trivium.training.rollback": ROLLBACK,
    "trivium.data.bucketing": BUCKETING,
    "trivium.generation.sampling": SAMPLING,
}
