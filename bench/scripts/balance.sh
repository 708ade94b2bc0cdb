#!/usr/bin/env bash
# A mixture of experts beside a dense model of the same active FLOPs on the data of examples/quickstart.toml, with and without
# balancing; three seeds. Prints validation losses and how uneven experts were, and draws the latter.
#
#     bench/scripts/balance.sh LOCKSTEP > bench/records/balance.txt        # writes bench/records/balance.svg too; with DEVICE=cuda STEPS=400 a minute on an H200
#
# Environment: DEVICE (cpu), STEPS (150), SEEDS ("1 2 3"), FOLDER (a temporary one, removed at the end).
set -euo pipefail
lockstep=$1
here=$(cd "$(dirname "$0")" && pwd)
steps=${STEPS:-150} seeds=${SEEDS:-1 2 3}
folder=${FOLDER:-$(mktemp -d)}
[ -n "${FOLDER:-}" ] || trap 'rm -rf "$folder"' EXIT
# Of 16 experts a token takes 3, and one that all share: 4 × 128 hidden units, and the router. The dense block has 512 and 8 more.
common=(--set "train.device=${DEVICE:-cpu}" --set "train.steps=$steps" --set train.validate_every=50 --set train.validation_sequences=64 --set model.tied_embeddings=true)
dense=(--set model.architecture=qwen3 --set model.ffn=520)
mixture=(--set model.architecture=dots1 --set model.expert_ffn=128 --set model.experts=16 --set model.experts_per_token=3
    --set model.shared_experts=1 --set model.balance_loss=0)
run() {
    local name=$1
    shift
    [ -e "$folder/$name/metrics.jsonl" ] || echo "$name" >&2
    "$lockstep" train "$here/../../examples/quickstart.toml" --run-dir "$folder/$name" --quiet "${common[@]}" "$@" >&2
}
for seed in $seeds; do
    run "dense-$seed" --set "train.seed=$seed" "${dense[@]}"
    run "unbalanced-$seed" --set "train.seed=$seed" "${mixture[@]}"
    run "balanced-$seed" --set "train.seed=$seed" "${mixture[@]}" --set model.balance_bias=0.01
done
"$lockstep" --version
python3 - "$folder" "$here/../records/balance.svg" $seeds <<'PYTHON'
import json, pathlib, sys

folder, out, seeds = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
KINDS = [("dense", "a dense block of 520", None), ("unbalanced", "16 experts of 128, top 3 and one shared, no balancing", "#c0392b"),
         ("balanced", "the same, balance_bias = 0.01", "#2471a3")]


def read(kind, seed):
    return [json.loads(line) for line in open(folder / f"{kind}-{seed}" / "metrics.jsonl")]


runs = {(kind, seed): read(kind, seed) for kind, _, _ in KINDS for seed in seeds}
steps = len(runs["balanced", seeds[0]])
tail = steps // 3
print(f"{steps} steps, seeds {', '.join(seeds)}; validation loss in nats per byte; loads as multiples of an even share, over the last {tail} steps")
for kind, what, color in KINDS:
    losses = [next(m["val_loss"] for m in reversed(runs[kind, s]) if m.get("val_loss")) for s in seeds]
    text = f"{what}: validation loss {', '.join(f'{x:.4f}' for x in losses)}, mean {sum(losses) / len(losses):.4f}"
    if color:
        last = [m for s in seeds for m in runs[kind, s][-tail:]]
        mean = lambda key: sum(m[key] for m in last) / len(last)
        text += (f"; most loaded expert of any layer {mean('expert_most'):.2f} in the mean, {max(m['expert_most'] for m in last):.2f} at most"
                 f"; least loaded {mean('expert_least'):.2f} in the mean, {min(m['expert_least'] for m in last):.2f} at least")
    print(text)

W, H, L, T, B = 720, 360, 60, 30, 40
top = max(4.0, max(m["expert_most"] for kind, _, color in KINDS if color for s in seeds for m in runs[kind, s]))
x = lambda step: L + (W - L - 20) * step / steps
y = lambda value: H - B - (H - B - T) * value / top
svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" font-size="12">',
       f'<rect width="{W}" height="{H}" fill="white"/>']
for tick in range(0, int(top) + 1, 1 if top < 10 else 2):
    svg.append(f'<line x1="{L}" x2="{W - 20}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
    svg.append(f'<text x="{L - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
for tick in range(0, steps + 1, max(steps // 5, 1)):
    svg.append(f'<text x="{x(tick):.1f}" y="{H - B + 18}" text-anchor="middle">{tick}</text>')
svg.append(f'<line x1="{L}" x2="{W - 20}" y1="{y(2):.1f}" y2="{y(2):.1f}" stroke="#555" stroke-dasharray="5 4"/>')
for i, (kind, what, color) in enumerate(k for k in KINDS if k[2]):
    for seed in seeds:
        points = " ".join(f'{x(m["step"]):.1f},{y(m["expert_most"]):.1f}' for m in runs[kind, seed])
        svg.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-opacity="0.8"/>')
    svg.append(f'<text x="{L + 10 + 370 * i}" y="{T - 12}" fill="{color}">{what}</text>')
svg.append(f'<text x="{W // 2}" y="{H - 6}" text-anchor="middle">step</text>')
svg.append(f'<text x="14" y="{H // 2}" text-anchor="middle" transform="rotate(-90 14 {H // 2})">most loaded expert, × even share</text>')
svg.append("</svg>")
open(out, "w").write("\n".join(svg) + "\n")
PYTHON
