#!/usr/bin/env bash
# Static checks, with the tools pinned in tools/go.mod and built into .cache/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.cache/bin

echo "== golangci-lint"
"$bin/golangci-lint" run ./...
for module in deploy e2e; do
	if [ -f $module/go.mod ]; then
		(cd $module && "$bin/golangci-lint" run --config ../.golangci.yml ./...)
	fi
done

echo "== go.mod holds what is imported"
go mod tidy -diff
go -C deploy mod tidy -diff
go -C e2e mod tidy -diff

echo "== shellcheck"
shellcheck .ci/run scripts/*.sh

# Exit 3 means that a known vulnerability is reached; anything else that its
# database could not be had, which says nothing about this code.
echo "== govulncheck"
rc=0
timeout 300 "$bin/govulncheck" ./... || rc=$?
case $rc in
0) ;;
3) exit 1 ;;
*) echo "lint: the vulnerability database is out of reach; not checked" ;;
esac
