# Completions of zebu for bash. `zebu __complete` knows the words, and quotes them.

_zebu() {
    local program=zebu kind="" line
    command -v zebu >/dev/null || program=$1
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ -z $kind ]]; then
            kind=$line
        else
            [[ $line == *[=,] ]] && compopt -o nospace 2>/dev/null
            COMPREPLY+=("$line")
        fi
    done < <("$program" __complete --bash "${COMP_LINE:0:COMP_POINT}" "${COMP_LINE:COMP_POINT}" "$2" 2>/dev/null)
    # Where there may be files, bash looks for them.
    [[ $kind == files* ]] || compopt +o default 2>/dev/null
}

complete -o default -F _zebu zebu
