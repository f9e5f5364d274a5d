#!/usr/bin/env bash
# Serve the embedded model, ask it a question through the OpenAI API, then benchmark that server.
set -euo pipefail

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url="http://127.0.0.1:$port"
log=$(mktemp)
# Words with spaces in quotes, so that what is shown can be pasted.
quoted() { for word; do case $word in *' '*) printf '"%s" ' "$word" ;; *) printf '%s ' "$word" ;; esac; done; }
show() { printf '\n\033[1m$ %s\033[0m\n' "$(quoted "$@")"; "$@"; }

printf '\033[1m$ tetrad serve --port %s &\033[0m\n' "$port"
tetrad serve --port "$port" >"$log" 2>&1 &
server=$!
figures=$(mktemp)
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log" "$figures"' EXIT

# Without the proxy that the environment may name: it does not know this machine.
healthy() { no_proxy='*' python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$url/health" 2>/dev/null; }
until healthy; do
    if ! kill -0 "$server" 2>/dev/null; then cat "$log" >&2; exit 1; fi
    sleep 0.2
done
cat "$log"

show tetrad chat --url "$url" "What is 3+5?"
show tetrad bench serve --base-url "$url" --dataset-name random-ids \
    --random-input-len 128 --random-output-len 32 --random-range-ratio 1.0 \
    --num-prompts 64 --max-concurrency 16 | tee "$figures" || {
    # Beside other work the client may be late, and says that its figures do not count (exit code 6).
    code=$?
    grep -q '^INVALID' "$figures" || exit "$code"
}
