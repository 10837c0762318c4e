#!/bin/sh
# Runs every test of what docs/reliability.md promises, and prints a table: test,
# cases, failures. Ends with 1 if there was any failure.
#
# usage: scripts/reliability.sh [--quick | --long | --seconds N] [TEST...]
#
# --quick takes some minutes, --long hours; without either it is as much as the
# slow tests of CI. With --seconds each generator runs for that time, those of one
# command side by side. With names of tests (the first column) only these run.
# ZEBU_SEED is the first seed (1), ZEBU_CASES or ZEBU_SECONDS have precedence
# (zebu-testkit/src/lib.rs).
#
# What a test counts is what it prints itself, one line a count; a test that ran
# nothing has failed. What is not there on a machine is skipped, and said so:
# cargo +nightly with miri and rust-src, cargo-fuzz and a corpus.
set -u
cd "$(dirname "$0")/.." || exit 1

amount=normal
case ${1:-} in
    --quick | --long)
        amount=${1#--}
        shift
        ;;
    --seconds)
        # All generators of a command at once, however many processors there are.
        export ZEBU_SECONDS="${2:?a number of seconds}" RUST_TEST_THREADS=64
        shift 2
        ;;
    -*)
        sed -n 's/^# usage: /usage: /p' "$0" >&2
        exit 2
        ;;
esac
wanted=" $* "

sh scripts/install-deps.sh cc mke2fs losetup qemu-img qemu-io || exit 1
if [ -z "${ZEBU_QEMU_IMG:-}" ] && bin=$(sh scripts/get-qemu.sh target/peers/qemu); then
    export ZEBU_QEMU_IMG="$bin/qemu-img" ZEBU_QEMU_IO="$bin/qemu-io"
fi

logs=target/reliability
mkdir -p "$logs"
table=$logs/table
: > "$table"
any=0
# The programs' tests run a part of their cases otherwise.
[ "$amount" = quick ] || export ZEBU_ALL=1

# One of three, by the amount.
of() {
    case $amount in
        quick) echo "$1" ;;
        normal) echo "$2" ;;
        long) echo "$3" ;;
    esac
}

is_wanted() {
    [ "$wanted" = "  " ] && return 0
    case $wanted in
        *" $1 "*) return 0 ;;
    esac
    return 1
}

row() {
    printf '| %-20s | %9s | %-42s | %8s |\n' "$@" | tee -a "$table"
}

# The sum of the numbers that an expression of sed finds in a log.
sum() {
    sed -n "$2" "$1" | awk '{ n += $1 } END { print n + 0 }'
}

# begin NAME: whether the test is wanted; its log is empty then.
begin() {
    is_wanted "$1" || return 1
    name=$1
    log=$logs/$1.log
    status=0
    : > "$log"
    echo "... $name" >&2
}

# run COMMAND...: a part of the test.
run() {
    echo "\$ $*" >> "$log"
    "$@" >> "$log" 2>&1 || status=$?
}

# end WHAT: the row of the test. WHAT says what is counted; without counts in the
# log, these are test functions.
end() {
    failures=$(sum "$log" 's/^test result:.* \([0-9]*\) failed;.*/\1/p')
    passed=$(sum "$log" 's/^test result:.* \([0-9]*\) passed;.*/\1/p')
    cases=$(grep -o 'cases: [0-9]*' "$log" | awk '{ n += $2 } END { print n + 0 }')
    what=$1
    if [ "$cases" = 0 ]; then
        cases=$passed
        what="test functions: $1"
    fi
    if [ "$failures" = 0 ] && { [ "$status" != 0 ] || [ "$cases" = 0 ]; }; then
        failures=1
    fi
    [ "$failures" = 0 ] || any=1
    row "$name" "$cases" "$what" "$failures"
    if [ "$failures" != 0 ]; then
        echo "    see $log:" >&2
        grep -E 'panicked|FAILED|WARNING: Thread|Undefined Behavior|watchdog|^error' "$log" |
            head -n 5 >&2
    fi
}

skip() {
    row "$name" "" "skipped: $1" ""
}

# cases N COMMAND...: a part of the test with N cases of each generator, unless
# another number or a time is asked for.
cases() {
    given=${ZEBU_CASES:-${ZEBU_SECONDS:-}}
    [ -n "$given" ] || export ZEBU_CASES="$1"
    shift
    "$@"
    [ -n "$given" ] || unset ZEBU_CASES
}

library() {
    run cargo test -p zebu "$@"
}

program() {
    run cargo test -p zebu-cli "$@"
}

row test cases "what is counted" failures
row -------------------- --------- ------------------------------------------ --------

if begin crash-replay; then
    which=$(of at_any_moment at_any_moment_a_hundred_thousand_times \
        at_any_moment_a_hundred_thousand_times)
    cases "$(of 600 10000 200000)" library --test crash -- --include-ignored --nocapture --exact "$which"
    end "states that a power cut may leave"
fi
if begin faults; then
    which=$(of some_operations_fail each_operation_fails_in_turn each_operation_fails_in_turn)
    library --test crash -- --include-ignored --nocapture --exact "faults::$which" damaged::damage_makes_a_change_fail
    end "operations failed, each in its own run"
fi
if begin write-errors; then
    library --test library -- --nocapture write_errors::
    end "operations and flushes failed"
fi
if begin dropped; then
    library --test dropped -- --nocapture
    end "requests abandoned at an await point"
fi
if begin simulator; then
    given=${ZEBU_SECONDS:-${ZEBU_CASES:-}}
    [ -n "$given" ] || export ZEBU_SECONDS="$(of 30 300 14400)"
    run cargo test -p zebu-sim -- --nocapture
    [ -n "$given" ] || unset ZEBU_SECONDS
    end "simulations of 120 steps"
fi
if begin new-images; then
    library --test crash -- --nocapture new_images
    cases "$(of 6 60 600)" program --test formats -- --nocapture new_formats::
    cases "$(of 24 200 2000)" program --test convert -- --nocapture old_content::
    cases "$(of 60 1000 10000)" program --test convert -- --nocapture written_names::
    end "conversions, and states of new images"
fi
if begin formats; then
    images=$(of 6 20 200)
    cases "$images" program --test small_formats -- --nocapture --skip damaged
    cases "$((60 * images))" program --test small_formats -- --nocapture damaged
    cases "$images" program --test formats -- --nocapture vmdk vhdx:: vhdx_create:: vdi:: --skip damaged
    cases "$((10 * images))" program --test formats -- --nocapture damaged_sparse damaged_descriptors damaged_images
    end "images of other formats"
fi
if begin spelling; then
    cases "$(of 20 100 2000)" program --test spelling -- --nocapture
    cases "$(of 300 1000 20000)" program --test formats -- --nocapture damaged_appliances
    end "spellings of containers"
fi
if begin broken-rules; then
    rules=$(grep -c '^            Rule::' zebu-core/src/broken.rs)
    run cargo test -p zebu -p zebu-sim --test crash --test simulate breaks -- --ignored --nocapture
    end "rules broken and detected, of $rules"
fi
if begin full-disk; then
    program --test convert -- --nocapture full_disk::
    end "writes to a full ext4"
fi
if begin killed; then
    program --test convert -- --nocapture killed::
    end "kills (SIGKILL) in the middle of I/O"
fi
if begin bitmaps; then
    cases "$(of 4 12 300)" program --test qcow2 -- --nocapture bitmap:: bitmap_damage::
    program --test servers -- --nocapture nbd_bitmaps::
    cases "$(of 3 6 300)" program --test servers -- --nocapture storage_daemon::
    end "images whose bitmaps are changed or damaged"
fi
if begin backups; then
    cases "$(of 20 60 10000)" program --test backup -- --nocapture backup_killed:: backup_power_cut::
    cases "$(of 10 25 1000)" program --test backup -- --nocapture backup_damage:: backup_source::
    program --test backup -- --nocapture --skip backup_killed:: --skip backup_power_cut:: \
        --skip backup_damage:: --skip backup_source::
    end "kills, power cuts, damaged sets, headers"
fi
if begin sources-change; then
    cases "$(of 15 150 3000)" program --test convert -- --nocapture source_changes::
    cases "$(of 12 100 2000)" program --test remote -- --nocapture http::no_read_has
    end "sources changed while they were read"
fi
if begin cache; then
    cases "$(of 3 12 300)" program --test remote -- --nocapture cache_dir::
    end "processes with one cache"
fi
if begin arguments; then
    cases "$(of 120 1500 20000)" program --test arguments -- --nocapture
    end "lists of arguments"
fi
if begin hostile-named; then
    library --test hostile -- --nocapture images:: history:: --skip generated
    end "images made by hand, and what is done"
fi
if begin hostile-generated; then
    runs=$(of 200 2000 100000)
    cases "$runs" library --test hostile -- --nocapture generated changes:: damaged_images chains_are_read
    cases "$runs" program --test cli -- --nocapture io_language::
    cases "$runs" program --test servers -- --nocapture vhost_bad_input::any_bytes
    cases "$(of 20 60 1000)" program --test convert -- --nocapture short_memory::
    cases "$(of 20 60 1000)" program --test cli -- --nocapture control_characters
    end "images, names, scripts and guests"
fi
if begin damage; then
    cases "$(of 1500 10000 200000)" library --test damage -- --nocapture --exact damage_then_work
    cases "$(of 3 3 60)" library --test damage -- --nocapture --skip damage_then_work
    end "images damaged, and worked with"
fi
if begin guests; then
    program --test servers -- --include-ignored --nocapture nbd_guest:: vhost_guest:: vhost_grow::
    end "machines on the servers' disks"
fi
if begin streams; then
    program --test remote -- --include-ignored --nocapture http:: ssh:: pipes import:: uploads::
    end "servers with faults, and pipes"
fi
if begin strict-mode; then
    program --test cli -- --nocapture untrusted::
    end "commands on images that name others"
fi
if begin locks; then
    library --lib -- --nocapture storage::lock
    program --test convert -- --nocapture lock::
    end "pairs of uses, zebu's and QEMU's"
fi
if begin together; then
    cases "$(of 20 500 20000)" program --test together -- --nocapture
    end "runs of two programs at once"
fi
if begin sessions; then
    cases "$(of 120 2000 100000)" program --test sessions -- --nocapture --exact sessions
    cases "$(of 24 200 10000)" program --test sessions -- --nocapture \
        targets_that_the_source_reads snapshots_over_other_sizes
    end "steps of zebu and QEMU in turn"
fi
if begin server-memory; then
    cases "$(of 6 60 600)" program --test servers -- --nocapture server_memory::
    end "loads of servers whose memory is measured"
fi
if begin blkdebug; then
    cases "$(of 60 1500 20000)" program --test cli -- --nocapture blkdebug::
    cases "$(of 150 4000 20000)" program --test cli -- --nocapture nested_drivers::
    end "scripts with injected errors, nested drivers"
fi
if begin one-thread; then
    cases "$(of 3000 100000 2000000)" library --test model -- --nocapture --exact one_thread
    library --test model -- --nocapture every_kind_of_image
    cases "$(of 1500 30000 500000)" library --test model -- --nocapture --exact filters_that_change_bytes
    end "requests, each with one right result"
fi
if begin many-threads; then
    cases "$(of 6000 100000 2000000)" library --test model -- --nocapture --exact many_threads
    library --test library -- --nocapture same_cluster::
    end "requests that overlap"
fi
if begin many-queues; then
    cases "$(of 30000 300000 20000000)" library --test many_queues -- --nocapture --exact many_queues
    end "verified requests of 4 to 16 threads"
fi
if begin exchanges; then
    cases "$(of 200 5000 100000)" library --test many_queues -- --nocapture exchanged
    end "exchanges of a device's chain under load"
fi
if begin interleavings; then
    cases 100000 run cargo test -p zebu-core --features interleavings --lib interleavings -- --nocapture
    end "schedules (shuttle)"
fi
if begin miri; then
    if cargo +nightly miri --version > /dev/null 2>&1; then
        # Two tests are left out that go through thousands of headers.
        run env MIRIFLAGS="-Zmiri-disable-isolation" CARGO_TARGET_DIR=target/miri \
            PROPTEST_CASES="$(of 2 16 256)" \
            cargo +nightly miri test -p zebu-core --lib -- structures:: drivers::signature storage::buffer storage::slab drivers::qcow2::map::table \
            --skip a_torn_header --skip errors_name_the_invalid_field
        end "structures and buffers under miri"
    else
        skip "no cargo +nightly miri"
    fi
fi
if begin thread-sanitizer; then
    source=$(rustc +nightly --print sysroot 2> /dev/null)/lib/rustlib/src/rust/library
    if [ -d "$source" ]; then
        host=$(rustc -vV | sed -n 's/^host: //p')
        # The kernel's writes into a ring are not seen by it: emulated I/O only.
        run env RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/tsan \
            ZEBU_ONLY=threads ZEBU_CASES="$(of 10000 50000 1000000)" \
            cargo +nightly test -Zbuild-std --target "$host" \
            -p zebu --test many_queues -- --nocapture --exact many_queues
        end "verified requests under ThreadSanitizer"
    else
        skip "no nightly rust-src"
    fi
fi
if begin fuzz; then
    seconds=${ZEBU_SECONDS:-$(of 0 0 3600)}
    if ! cargo fuzz --version > /dev/null 2>&1; then
        skip "no cargo-fuzz"
    elif [ ! -d fuzz/corpus ]; then
        skip "no corpus (fuzz/seeds.sh makes one)"
    else
        for target in $(sed -n 's/^name = "\([a-z_]*\)"$/\1/p' fuzz/Cargo.toml); do
            [ -d "fuzz/corpus/$target" ] || continue
            # What is known already, and then for as long as was asked.
            if [ "$seconds" = 0 ]; then limit=-runs=0; else limit=-max_total_time=$seconds; fi
            run env RUSTC_BOOTSTRAP=1 cargo fuzz run -s none "$target" -- \
                -max_len=131072 -rss_limit_mb=1024 -malloc_limit_mb=512 -timeout=60 "$limit"
        done
        sed 's/^Done \([0-9]*\) runs.*/cases: \1/' "$log" > "$log.counted"
        mv "$log.counted" "$log"
        end "inputs of the fuzz targets"
    fi
fi

echo "The table is in $table, what the tests said in $logs." >&2
exit $any
