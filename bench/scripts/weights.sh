#!/usr/bin/env bash
# Weights in bf16, fp8 and int8: bits per byte beside the speed of decoding, of llama-124m trained on source code.
#
#     bench/scripts/weights.sh LOCKSTEP FOLDER [DEVICE] > bench/records/weights.txt       # writes bench/records/weights.svg too; 2 minutes on an H200
#
# FOLDER is what `bench/scripts/fp8-loss.sh LOCKSTEP data FOLDER` has made. DEVICE is cuda where it is not given. Environment: STEPS (2000), RECORDS
# (bench/records).
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: weights.sh LOCKSTEP FOLDER [DEVICE]" >&2; exit 2; }
lockstep=$(realpath "$1") folder=$(realpath "$2") device=${3:-cuda}
records=$(realpath "${RECORDS:-$(dirname "$0")/../records}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "# bench/scripts/weights.sh LOCKSTEP FOLDER $device at ${COMMIT:-$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null)}"
"$lockstep" train "$folder/run.toml" --run-dir "$work/run" --quiet --set precision.policy=bf16 --set train.device="$device" \
    --set train.steps="${STEPS:-2000}" >&2
# Alternating, three times.
for round in 1 2 3; do
    for format in policy fp8 int8; do
        for batch in 1 32; do
            "$lockstep" bench generate "$folder/run.toml" --device "$device" --precision bf16 --weights $format --batch $batch \
                --prompt 64 --tokens 128 --format json >"$work/$format-$batch-$round.json"
        done
    done
done
for format in policy fp8 int8; do
    "$lockstep" eval "$work/run" --validation --weights $format --format json >"$work/$format.json"
done
python3 - "$work" "$records/weights.svg" <<'PYTHON'
import json, pathlib, statistics, sys
work, svg = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
names = {"policy": "bf16", "fp8": "fp8", "int8": "int8"}
rows = []
for key, name in names.items():
    score = json.loads((work / f"{key}.json").read_text())
    score = score.get("score", score)
    rates = [statistics.median(json.loads((work / f"{key}-{batch}-{n}.json").read_text())["tokens_per_s"] for n in (1, 2, 3)) for batch in (1, 32)]
    weights = json.loads((work / f"{key}-1-1.json").read_text())["weight_bytes"]
    rows.append((name, score["loss"], score.get("bits_per_byte") or score["loss"] / 0.6931471805599453, rates, weights))
unit = "bits per byte" if json.loads((work / "policy.json").read_text()).get("bits_per_byte") else "bits per token"
base = rows[0][2]
print(f"{'weights':8} {'read per token':>15} {'loss, nats':>11} {unit:>15} {'difference':>11} {'1 text':>15} {'32 texts':>15}")
for name, loss, bits, (one, many), weights in rows:
    print(f"{name:8} {weights / 2**20:11.1f} MiB {loss:11.4f} {bits:15.4f} {100 * (bits / base - 1):+10.3f}% {one:9.0f} tok/s {many:9.0f} tok/s")
W, H, L, R, T, B = 620, 330, 80, 30, 44, 56
def axis(values, low, high):
    least, most = min(values), max(values)
    room = (most - least or abs(most) or 1) * 0.25
    return lambda v: low + (v - least + room) / (most - least + 2 * room) * (high - low)
x = axis([r[3][0] for r in rows], L, W - R)
y = axis([r[2] for r in rows], H - B, T)
out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" font-size="12">',
       f'<rect width="{W}" height="{H}" fill="white"/>',
       f'<text x="{L}" y="20" font-size="14">llama-124m: quality against speed of decoding, by what weights are kept in</text>',
       f'<line x1="{L}" x2="{W - R}" y1="{H - B}" y2="{H - B}" stroke="#444"/><line x1="{L}" x2="{L}" y1="{T}" y2="{H - B}" stroke="#444"/>',
       f'<text x="{(L + W - R) / 2}" y="{H - 14}" text-anchor="middle">tokens/s of one text</text>',
       f'<text x="18" y="{(T + H - B) / 2}" text-anchor="middle" transform="rotate(-90 18 {(T + H - B) / 2})">{unit} (lower is better)</text>']
for name, _, bits, (one, _), _ in rows:
    px, py = x(one), y(bits)
    out.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{H - B}" y2="{H - B + 5}" stroke="#444"/><text x="{px:.1f}" y="{H - B + 18}" text-anchor="middle">{one:.0f}</text>')
    side, at = ("start", px + 9) if px < W / 2 else ("end", px - 9)
    label = f"{name}: {bits:.4f} ({100 * (bits / base - 1):+.3f}%)"
    out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="#2563eb"/><text x="{at:.1f}" y="{py - 7:.1f}" text-anchor="{side}">{label}</text>')
svg.write_text("\n".join([*out, "</svg>"]) + "\n")
PYTHON
