#compdef jaxrl
# Completion of jaxrl for zsh, after compinit:  eval "$(jaxrl completion zsh)"
_jaxrl_words() {
    case $1 in
        # WORDS
    esac
}
_jaxrl() {
    local word=$words[CURRENT] before=$words[CURRENT-1] list=
    (( CURRENT > 3 )) && list=$(_jaxrl_words "$words[2] $words[3]")
    [[ -z $list ]] && (( CURRENT > 2 )) && list=$(_jaxrl_words "$words[2]")
    (( CURRENT == 2 )) && list=$(_jaxrl_words '')
    local -a known=("${(@f)list}") values names options
    if [[ $before == -* ]] && (( $known[(Ie)$before=] )); then
        values=("${(@)${(M@)known:#$before=?*}#$before=}")
    elif [[ $word == *=* ]]; then
        before=${word%%=*}
        values=("${(@)${(M@)known:#$before=?*}#$before=}")
        compset -P 1 '*='
    else
        names=(${${known:#*=?*}:#(-*|/)})
        options=(${${(M)${known:#*=?*}:#-*}%=})
        [[ $word == -* ]] && compadd -- $options
        compadd -S '' -- ${(M)names:#*=}
        compadd -- ${names:#*=}
        (( $#names )) && [[ $list != */ ]] && return
    fi
    if (( $#values )); then compadd -- $values; else _files; fi
}
compdef _jaxrl jaxrl
