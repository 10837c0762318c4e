# Completions of zebu for fish. `zebu __complete` knows the words.

function __zebu_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l all (commandline -op)
    set -l after
    if test (count $all) -gt (math (count $before) + 1)
        set after $all[(math (count $before) + 2)..]
    end
    set -l lines (zebu __complete (count $before) $before "$current" $after 2>/dev/null)
    if test (count $lines) -gt 1
        printf '%s\n' $lines[2..]
    end
    set -l kind (string split \t -- $lines[1])
    if test "$kind[1]" = files
        set -l rest (string sub -s (math 1 + (string length -- "$kind[2]")) -- $current)
        for path in (__fish_complete_path $rest)
            echo "$kind[2]$path"
        end
    end
end

complete -c zebu -f -a '(__zebu_complete)'
