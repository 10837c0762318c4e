# Benchmarks. docs/benchmarking.md says what they do.
#
#   make bench          everything, into docs/benchmarks.md, docs/charts/ and the README
#   make bench-quick    the same small and short, into target/bench-quick
#   make bench EXPERIMENTS="convert compare" BENCH_DIR=/a/fast/disk BENCH_FLAGS="--runs 9"

TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)
BENCH_DIR ?= target/bench
BENCH_FLAGS ?=
EXPERIMENTS ?=
# A run of some experiments must not take the place of the page of all.
BENCH_PAGE ?= $(if $(strip $(EXPERIMENTS)),--page $(BENCH_DIR)/benchmarks.md,--page docs/benchmarks.md --readme README.md)
ZEBU_BENCH = QEMU_IMG=$${QEMU_IMG:-$$(sh scripts/get-qemu-newest.sh target/peers/qemu-newest)} $(TARGET_DIR)/release/zebu-bench

# Every promise of docs/reliability.md, tested, with a table of the cases:
#
#   make reliability    RELIABILITY="--quick" within minutes, "--long" for hours;
#                       with names of tests, only these

RELIABILITY ?=

# What is on other machines, with real servers that Go, npm and Debian's packages bring: S3
# (versitygw), Google Cloud Storage (fake-gcs-server), Azure (Azurite), Ceph:
#
#   make stores         those that can be had here; a test that lacks its server is skipped

# QEMU's own tests of qemu-img and qemu-io, with zebu in their places:
#
#   make iotests        those that pass; IOTESTS="214 271" others

IOTESTS ?=

# The libraries for other languages, and the adapters for virtual machine monitors:
#
#   make bindings       PROFILE=release as they are used

.PHONY: bench bench-quick bench-build reliability iotests stores bindings

bench: bench-build
	$(ZEBU_BENCH) run --dir $(BENCH_DIR) $(BENCH_FLAGS) $(EXPERIMENTS)
	$(ZEBU_BENCH) report --results $(BENCH_DIR)/results.json $(BENCH_PAGE)

bench-quick: bench-build
	$(ZEBU_BENCH) run --dir target/bench-quick --size 128M --runs 3 --seconds 0.05 $(BENCH_FLAGS) $(EXPERIMENTS)
	$(ZEBU_BENCH) report --results target/bench-quick/results.json --page target/bench-quick/benchmarks.md

bench-build:
	cargo build --release -p zebu-cli -p zebu-bench

reliability:
	sh scripts/reliability.sh $(RELIABILITY)

iotests:
	cargo build -p zebu-cli
	sh scripts/iotests.sh $(IOTESTS)

stores:
	sh scripts/stores.sh

bindings:
	ZEBU_VALGRIND=1 cargo test -p zebu-capi
	sh scripts/test-go.sh
	sh scripts/test-python.sh
	sh scripts/test-vmm.sh

# Packages, and what they depend on (docs/install.md):
#
#   make packages       static programs, .deb, .rpm, an OCI image, in target/packages
#   make deny           licences, advisories and sources of the crates, by cargo-deny

.PHONY: packages deny

packages:
	sh scripts/package.sh

deny:
	cargo deny check
	cargo deny --manifest-path bindings/python/Cargo.toml --config deny.toml check
	cargo deny --manifest-path bindings/vmm/Cargo.toml --config deny.toml check
