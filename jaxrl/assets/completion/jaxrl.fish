# Completion of jaxrl for fish:  jaxrl completion fish | source
function __jaxrl_words
    switch $argv[1]
        # WORDS
    end
end
function __jaxrl
    set -l typed (commandline -opc)
    set -l word (commandline -ct)
    set -l list
    test (count $typed) -gt 2; and set list (__jaxrl_words "$typed[2] $typed[3]")
    test (count $typed) -gt 1; and test -z "$list"; and set list (__jaxrl_words $typed[2])
    test (count $typed) -eq 1; and set list (__jaxrl_words '')
    set -l before $typed[-1]
    if string match -q -- '-*' $before; and contains -- "$before=" $list
        set -l values (string match -- "$before=*" $list | string replace -- "$before=" '' | string match -v -- '')
        if set -q values[1]
            printf '%s\n' $values
        else
            __fish_complete_path $word
        end
    else if string match -q -- '*=*' $word
        set -l key (string split -m 1 -- = $word)
        set -l values (string match -- "$key[1]=*" $list | string match -v -- "$key[1]=")
        if set -q values[1]
            printf '%s\n' $values
        else
            printf "$key[1]=%s\n" (__fish_complete_path $key[2])
        end
    else
        set -l names (string match -r -- '^[^=/]+=?$' $list)
        set -l free (string match -v -- '-*' $names)
        if string match -q -- '-*' $word
            string match -- '-*' $names | string replace -r -- '=$' ''
        else
            string join \n $free
        end
        if contains -- / $list; or not set -q free[1]
            __fish_complete_path $word
        end
    end
end
complete -c jaxrl -f -a '(__jaxrl)'
