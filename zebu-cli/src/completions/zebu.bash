# Completions of zebu for bash. `zebu __complete` knows the words.

_zebu() {
    local words=() last=0 rest=$COMP_LINE index word typed kind line
    # Bash also ends words at = and :, so what touches the word before belongs to it.
    for ((index = 0; index < ${#COMP_WORDS[@]}; index++)); do
        word=${COMP_WORDS[index]}
        if ((index > 0)) && [[ $rest != [[:space:]]* ]]; then
            words[${#words[@]} - 1]+=$word
        else
            [[ -n $word ]] && rest=${rest#"${rest%%[![:space:]]*}"}
            words+=("$word")
        fi
        rest=${rest#"$word"}
        ((index == COMP_CWORD)) && last=$((${#words[@]} - 1)) && typed=$word
    done
    # Of the word at the cursor only what is before it.
    words[last]=${words[last]%%[[:space:]]*}
    COMPREPLY=()
    [[ $typed == = || $typed == : ]] && typed=
    local before=${words[last]%"$typed"} plain=("${words[@]//\\/}")
    while IFS= read -r line; do
        if [[ -z $kind ]]; then
            kind=$line
            continue
        fi
        word=${line%%$'\t'*}
        [[ $word == *[=,] ]] && compopt -o nospace 2>/dev/null
        word=${word#"$before"}
        COMPREPLY+=("$([[ $word == *[[:space:]]* ]] && printf '%q' "$word" || printf '%s' "$word")")
    done < <(zebu __complete "$last" "${plain[@]}" 2>/dev/null)
    if [[ $kind == files* ]]; then
        compopt -o filenames 2>/dev/null
        while IFS= read -r line; do
            COMPREPLY+=("$line")
        done < <(compgen -f -- "$typed")
    fi
}

complete -F _zebu zebu
