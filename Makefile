# Targets for people; CI calls .ci/run.
.PHONY: check test bench
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
RACE = ./internal/consensus ./internal/raftlog ./internal/mvcc/... ./internal/watch ./internal/state ./internal/lease ./internal/rpc ./internal/server

check:
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	go run $(STATICCHECK) ./...
	go test -race $(RACE)

test:
	go test ./...
	cd test/compat && go test ./...
	cd test/kube && go test ./...

bench:
	go run ./test/bench
