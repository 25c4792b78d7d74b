package resolver

import "github.com/sluice-dns/sluice/resolver/internal/dnswire"

// CheckType returns the mnemonic of an RR type that somebody wrote as a mnemonic or as TYPE123.
func CheckType(s string) (string, error) {
	t, err := dnswire.ParseType(s)
	return dnswire.TypeText(t), err
}
