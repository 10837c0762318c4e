# Completions of zebu for fish. `zebu __complete` knows the words.

# Prints the kind of what may be at the cursor, then words.
function __zebu_ask
    set -l before (commandline -opc)
    set -l all (commandline -op)
    set -l current (commandline -ct)
    # A quotation mark may be open.
    set current (string unescape -- "$current"; or string unescape -- "$current'"; or string unescape -- "$current\"")
    set -l program zebu
    command -q zebu; or set program $before[1]
    # Only a word that is not empty is one of all.
    set -l next (math (count $before) + 1)
    test -n "$current"; and set next (math $next + 1)
    set -l after
    test (count $all) -ge $next; and set after $all[$next..]
    $program __complete (count $before) $before "$current" $after 2>/dev/null
end

function __zebu_words
    set -l lines (__zebu_ask)
    # Fish quotes all but a tilde at the start, which it would take for a home.
    test (count $lines) -gt 1; and string match -v '~*' -- $lines[2..]
end

function __zebu_wants_files
    __zebu_ask | string match -q 'files*'
end

complete -c zebu -f -a '(__zebu_words)'
complete -c zebu -n __zebu_wants_files -F
