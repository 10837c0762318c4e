# Benchmarks. docs/benchmarking.md tells what they do.
#
#   make bench          everything, into docs/benchmarks.md and docs/charts/
#   make bench-quick    the same small and short, in less than ten minutes
#   make bench EXPERIMENTS="convert compare" BENCH_DIR=/a/fast/disk BENCH_FLAGS=--cold

TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)
BENCH_DIR ?= target/bench
BENCH_FLAGS ?=
EXPERIMENTS ?=
# A run of some experiments must not take the place of the report of all.
BENCH_REPORT ?= $(if $(strip $(EXPERIMENTS)),$(BENCH_DIR)/report.md,docs/benchmarks.md)

# Every promise of docs/reliability.md, tested, with a table of the cases:
#
#   make reliability    RELIABILITY="--quick" within minutes, "--long" for hours;
#                       with names of tests, only these

RELIABILITY ?=

.PHONY: bench bench-quick bench-build reliability

bench: bench-build
	$(TARGET_DIR)/release/zebu-bench --dir $(BENCH_DIR) --report $(BENCH_REPORT) $(BENCH_FLAGS) $(EXPERIMENTS)

bench-quick: bench-build
	$(TARGET_DIR)/release/zebu-bench --quick --dir $(BENCH_DIR) --report $(BENCH_DIR)/quick.md $(BENCH_FLAGS) $(EXPERIMENTS)

bench-build:
	cargo build --release -p zebu-cli -p zebu-bench

reliability:
	sh scripts/reliability.sh $(RELIABILITY)
