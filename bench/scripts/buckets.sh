#!/bin/sh
# Data and a mirror in a bucket of a server from packages: moto (`pip install "moto[server]"`), or s3s-fs, which checks signatures (`cargo install s3s-fs
# --features binary`). A relay in front of it is killed, stopped and started again while runs train: the losses must be those from files, and what is in
# the mirror must be whole.
# usage: buckets.sh LOCKSTEP MOTO_SERVER|S3S_FS [PORT]   (PYTHON: one with boto3, if not the one beside moto)
set -eu
lockstep=$(realpath "$1")
program=$(realpath "$2")
port=${3:-5055}
folder=$(mktemp -d)
server= storage=
trap 'kill "$server" "$storage" 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"

export AWS_ENDPOINT_URL_S3="http://127.0.0.1:$port" AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_REGION=us-east-1
export XDG_CACHE_HOME="$folder/cache"
python=${PYTHON:-$(dirname "$program")/python3}

# The server stays: moto keeps objects in memory; what is killed is the relay that all connections go through.
cat >relay.py <<'P'
import asyncio, sys
async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def serve(reader, writer):
    try:
        there = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        return writer.close()
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
P
start() {
    "$python" relay.py "$port" $((port + 1)) &
    server=$!
}
fill() {
    until "$python" - <<'P'
import boto3, os, pathlib, sys
s3 = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
try:
    s3.create_bucket(Bucket="data")
except (s3.exceptions.BucketAlreadyExists, s3.exceptions.BucketAlreadyOwnedByYou):
    pass
except Exception:
    sys.exit(1)
for path in sorted(pathlib.Path("bucket").rglob("*")):
    if path.is_file():
        s3.upload_file(str(path), "data", str(path.relative_to("bucket")))
P
    do sleep 0.2; done
}
losses() { sed -E 's/.*"step":([0-9]+).*"loss":([^,]*),.*/\1 \2/' "$1/metrics.jsonl"; }
same() {
    losses "$1" >one; losses "$2" >two
    if cmp -s one two; then echo "$3: the same losses in all $(wc -l <one) steps"; else echo "$3: other losses"; diff one two | head; exit 1; fi
}
train() { "$lockstep" train run.toml --quiet --run-dir "$@" 2>&1 | grep -v '^finished' || true; }

mkdir corpus
i=0
while [ $i -lt 300000 ]; do echo "line $i: the square is $((i * i % 9973))."; i=$((i + 1)); done >corpus/a.txt
cat >run.toml <<'T'
[model]
vocab_size = 256
layers = 2
dim = 64
heads = 4
ffn = 128
[data]
paths = ["corpus"]
bucket_timeout = 60.0
[train]
steps = 150
seq = 128
global_batch = 16
[checkpoint]
every = 25
T
"$lockstep" data prepare run.toml --out bucket/tokens >/dev/null
text=s3://data/text
case ${program##*/} in
    # It answers 500 where a folder is asked for as an object, which others do not have.
    s3s-fs) mkdir objects && text=s3://data/text/a.txt && set -- --access-key test --secret-key test --host 127.0.0.1 --port $((port + 1)) objects ;;
    *) set -- -H 127.0.0.1 -p $((port + 1)) ;;
esac
"$program" "$@" >server.log 2>&1 &
storage=$!
start
fill

echo "== losses from a bucket and from files"
train files --set data.prepared=bucket/tokens
train bucket --set data.prepared=s3://data/tokens
same files bucket "${program##*/}"
rm -rf cache
train ranks --set data.prepared=s3://data/tokens --set parallel.dp=2
train ranks-files --set data.prepared=bucket/tokens --set parallel.dp=2
same ranks-files ranks "two ranks"

echo "== text in a bucket"
mkdir -p bucket/text && cp corpus/a.txt bucket/text/
fill
"$lockstep" data prepare run.toml --set "data.paths=[\"$text\"]" --out from-bucket >/dev/null
cmp from-bucket/train.shard bucket/tokens/train.shard && echo "the same tokens"

echo "== the relay killed and started again while a run trains"
rm -rf cache
train killed --set data.prepared=s3://data/tokens --set data.cache_size="1 MiB" >killed.log 2>&1 &
run=$!
for round in 1 2 3; do
    sleep 0.7
    kill -9 "$server"; wait "$server" 2>/dev/null || true
    sleep 1
    start
done
wait "$run" || { cat killed.log; exit 1; }
same files killed "killed three times"

echo "== the relay stopped (SIGSTOP) for two seconds, three times"
rm -rf cache
train slowed --set data.prepared=s3://data/tokens --set data.cache_size="1 MiB" >slowed.log 2>&1 &
run=$!
for round in 1 2 3; do sleep 0.5; kill -STOP "$server"; sleep 2; kill -CONT "$server"; done
wait "$run" || { cat slowed.log; exit 1; }
same files slowed "stopped"

echo "== a mirror: the run directory deleted, resumed from the bucket"
train mirrored --set data.prepared=bucket/tokens --set checkpoint.mirror=s3://data/runs
"$lockstep" train run.toml --quiet --run-dir half --set data.prepared=bucket/tokens --set checkpoint.mirror=s3://data/runs &
run=$!
until ls half/checkpoints 2>/dev/null | grep -q step-00000075; do sleep 0.02; done
sleep 0.5
kill -9 "$run"; wait "$run" 2>/dev/null || true
rm -rf half
train half --set data.prepared=bucket/tokens --set checkpoint.mirror=s3://data/runs
losses files | tail -n "$(wc -l <half/metrics.jsonl)" >one; losses half >two
cmp one two && echo "resumed from the mirror: the same losses in the last $(wc -l <two) steps"
