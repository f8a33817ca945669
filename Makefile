# The parts of a build that are more than `go build ./cmd/spillway`.

BUNDLE = build/gpu
GOFLAGS_BUNDLE = -trimpath -ldflags "-s -w"

# Packages with tests that open the driver: the others run on doubles, which need no GPU.
GPU_TESTS = ./device/cuda/driver ./kernels/cuda ./kernels/cuda/blas ./kernels/cuda/nvrtc

.PHONY: gpu
# gpu builds a folder, and an archive of it, that needs no Go where it runs:
# build/gpu/run.sh does all that a GPU is needed for.
gpu:
	rm -rf $(BUNDLE) $(BUNDLE).tar.gz
	mkdir -p $(BUNDLE)/tests
	CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go build $(GOFLAGS_BUNDLE) $(if $(wildcard kernels/cuda/images/packed/*.tar.zst),-tags gpukernels) -o $(BUNDLE)/ ./cmd/spillway ./internal/testkit/gpucheck
	@$(foreach p,$(GPU_TESTS),CGO_ENABLED=0 GOOS=linux GOARCH=amd64 go test -c $(GOFLAGS_BUNDLE) -o $(BUNDLE)/tests/$(subst /,_,$(patsubst ./%,%,$(p))).test $(p) && ) true
	cp internal/testkit/gpucheck/run.sh internal/testkit/gpucheck/torch_gpt2.py $(BUNDLE)/
	git rev-parse HEAD > $(BUNDLE)/commit 2>/dev/null || echo unknown > $(BUNDLE)/commit
	tar -C $(dir $(BUNDLE)) -czf $(BUNDLE).tar.gz $(notdir $(BUNDLE))
	du -sm $(BUNDLE) $(BUNDLE).tar.gz
	test $$(du -sm $(BUNDLE).tar.gz | cut -f1) -lt 40

.PHONY: same
# same compares what two builds do: make same OLD=OLD/spillway NEW=NEW/spillway
same:
	go run ./benchmarks/same -a $(OLD) -b $(NEW)

.PHONY: long campaigns faults
# long runs every case of the tests, and what continuous integration samples. It takes
# up to an hour on two cores, and runs before a change counts as done.
long:
	.ci/long

# campaigns are what takes hours: every model on every GPU, every combination of a run's
# options, 2,000 kills, what surrounds checkpoints (benchmarks/campaigns), every planted fault.
campaigns: faults
	SPILLWAY_LONG=all SPILLWAY_TEST_MPI=1 go test -timeout 6h ./...
	go run ./benchmarks/kills
	for c in folders readers connections calls soak; do go run ./benchmarks/campaigns $$c || exit 1; done

# faults plants every fault of internal/testkit/faults, one after the other, and fails
# where the tests of its package, and of those that import it, miss one.
faults:
	go run ./internal/testkit/faults

.PHONY: web
# web builds the planner for browsers, a folder that any host of static files can serve.
# It prints the sizes and fails above 10 MB.
web:
	go run ./cmd/spillway/web -out build/web

.PHONY: release
# release builds the archives of a release with their checksums: see .ci/release.
release:
	.ci/release build/release
