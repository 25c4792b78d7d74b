package resolver

import (
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/validator"
)

// DNSSECOptions steer validation; the zero value validates nothing.
type DNSSECOptions struct {
	Validate bool
	// Anchors is the text of a file of DS and DNSKEY records (zone-file syntax) that are trusted, AnchorsFile
	// its name in errors. An empty text trusts nothing.
	Anchors, AnchorsFile string
	// Insecure are names at and below which nothing is validated (negative trust anchors, RFC 7646).
	Insecure []Name
	// Skew is how far the clocks of signers and ours may be apart.
	Skew time.Duration
	// SHA1 validates signatures of the algorithms 5 and 7 too, whose zones are insecure otherwise (RFC 9905).
	SHA1 bool
}

// newValidator makes the validator of an engine whose caches and iterator stand.
func (e *engine) newValidator(o *Options) (*validator.Validator, error) {
	vo := validator.Options{Full: !o.Answers.Minimal, Epoch: e.answers.Epoch}
	if !o.DNSSEC.Validate {
		return validator.New(vo), nil
	}
	e.judges = true
	anchors, err := validator.ParseAnchors(o.DNSSEC.Anchors, o.DNSSEC.AnchorsFile)
	if err != nil {
		return nil, err
	}
	vo.Fetch, vo.Cache, vo.Anchors = e.iterator, e.rrsets, anchors
	vo.Skew, vo.SHA1 = o.DNSSEC.Skew, o.DNSSEC.SHA1
	for _, n := range o.DNSSEC.Insecure {
		vo.Insecure = append(vo.Insecure, validator.Insecure{Name: n})
	}
	return validator.New(vo), nil
}
