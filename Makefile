VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
TOOLS   := .cache/bin/.built

.PHONY: build dist test lint fmt demo bench clean
build: ## bin/dnsguard, one static binary
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o bin/dnsguard ./cmd/dnsguard
dist: ## bin/dnsguard-linux-amd64 and -arm64, for deploy/Containerfile
	scripts/dist.sh
demo: build ## play an incident in a network-namespace laboratory (root)
	bin/dnsguard demo
test: ## every test: unit, race, kernel, fuzz, Kubernetes end to end (root)
	scripts/deps.sh test
	scripts/test.sh
lint: $(TOOLS) ## static checks
	scripts/deps.sh lint
	scripts/lint.sh
fmt: $(TOOLS)
	.cache/bin/gofumpt -w $$(git ls-files '*.go')
bench: build ## measure against peers; wants a quiet machine (root)
	scripts/deps.sh bench
	CGO_ENABLED=0 go build -C bench/peers -trimpath -buildvcs=false -ldflags '-s -w' -o ../../.cache/bench/ ./coredns
	go build -o .cache/bench/ ./bench/load ./bench/echo ./bench/run
	.cache/bench/run $(BENCHFLAGS)
clean:
	rm -rf bin .cache
$(TOOLS): tools/go.mod tools/go.sum
	@echo 'building the pinned tools into .cache/bin: minutes the first time, nothing later'
	mkdir -p .cache/bin && go build -C tools -trimpath -buildvcs=false -gcflags=all=-dwarf=false -gcflags=std= -ldflags '-s -w' -o ../.cache/bin/ tool && touch $@
