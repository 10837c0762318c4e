#compdef zebu
# Completions of zebu for zsh. `zebu __complete` knows the words.

_zebu() {
    local line kind prefix word what program=zebu
    local -a typed lines values texts open_values open_texts
    # Of the word at the cursor what is before it, also in quotation marks.
    typed=("${(@Q)words}")
    typed[CURRENT]=${(Q)PREFIX}
    (( $+commands[zebu] )) || program=${(Q)words[1]}
    lines=("${(@f)$($program __complete $((CURRENT - 1)) "${(@)typed}" 2>/dev/null)}")
    kind=${lines[1]%%$'\t'*}
    prefix=${lines[1]#*$'\t'}
    for line in "${(@)lines[2,-1]}"; do
        [[ -n $line ]] || continue
        word=${line%%$'\t'*}
        what=${line#*$'\t'}
        # After these more of the same word follows.
        if [[ $word == *[=,] ]]; then
            open_values+=("$word")
            open_texts+=("$word${what:+ -- $what}")
        else
            values+=("$word")
            texts+=("$word${what:+ -- $what}")
        fi
    done
    (( $#values )) && compadd -l -d texts -a values
    (( $#open_values )) && compadd -l -S '' -d open_texts -a open_values
    if [[ $kind == files ]]; then
        compset -P "${(b)prefix}"
        _files
    fi
}

if [[ $funcstack[1] == _zebu ]]; then
    _zebu "$@"
else
    compdef _zebu zebu
fi
