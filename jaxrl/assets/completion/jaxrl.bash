# Completion of jaxrl for bash 4 or later:  eval "$(jaxrl completion bash)"
_jaxrl_words() {
    case $1 in
        # WORDS
    esac
}
_jaxrl() {
    # The words up to the cursor, split at spaces: COMP_WORDS is split at `=` and `:` too.
    local line=${COMP_LINE:0:COMP_POINT} words= prefix= reply
    local -a typed
    read -ra typed <<< "$line"
    [[ $line == *[[:space:]] ]] && typed+=('')
    local n=${#typed[@]}
    local word=${typed[n-1]} before=${typed[n-2]}
    (( n > 3 )) && words=$(_jaxrl_words "${typed[1]} ${typed[2]}")
    [[ -z $words ]] && (( n > 2 )) && words=$(_jaxrl_words "${typed[1]}")
    (( n == 2 )) && words=$(_jaxrl_words '')
    [[ $before == -* && $'\n'$words$'\n' == *$'\n'"$before="$'\n'* ]] && prefix=$before=
    COMPREPLY=()
    if [[ $prefix$word == *=* ]]; then
        # Readline replaces what follows the last break, which may be `=`.
        local begun=$prefix$word
        [[ -z $prefix && $COMP_WORDBREAKS == *=* ]] && prefix=${word%%=*}=
        while read -r reply; do
            [[ $reply == "$begun"* && $reply != *= ]] && COMPREPLY+=("${reply#"$prefix"}")
        done <<< "$words"
    else
        while read -r reply; do
            case $reply in
                '' | / | *=?*) ;;
                -*) [[ -n $word && $reply == "$word"* ]] && COMPREPLY+=("${reply%=}") ;;
                "$word"*) COMPREPLY+=("$reply") ;;
            esac
        done <<< "$words"
        if (( ${#COMPREPLY[@]} )) && [[ $words == */ ]]; then
            while read -r reply; do
                [[ -d $reply ]] && reply+=/
                COMPREPLY+=("$reply")
            done < <(compgen -f -- "$word")
        fi
        [[ ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2> /dev/null
    fi
}
complete -o default -F _jaxrl jaxrl
