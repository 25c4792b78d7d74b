package validator

import (
	"fmt"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
	"github.com/sluice-dns/sluice/resolver/internal/validator/rrsig"
)

// Fixed are trust anchors that do not change.
type Fixed map[dnsname.Name]*struct{ ds, keys []byte }

// ParseAnchors reads DS and DNSKEY records in zone-file syntax; file names the text in errors.
func ParseAnchors(text, file string) (Fixed, error) {
	records, err := dnswire.ParseRecords(text, ".", file, 3600)
	if err != nil {
		return nil, err
	}
	f := make(Fixed)
	for _, r := range records {
		a := f[r.Name]
		if a == nil {
			a = new(struct{ ds, keys []byte })
			f[r.Name] = a
		}
		switch r.Type {
		case dnswire.TypeDS:
			a.ds = query.AppendRData(a.ds, r.Data)
		case dnswire.TypeDNSKEY:
			a.keys = query.AppendRData(a.keys, r.Data)
		default:
			return nil, fmt.Errorf("%s: %v is a record of type %s; trust anchors are DS or DNSKEY", file, r.Name, dnswire.TypeText(r.Type))
		}
	}
	return f, nil
}

// At implements Anchors.
func (f Fixed) At(name dnsname.Name) (ds, keys []byte, ok bool) {
	a := f[name]
	if a == nil {
		return nil, nil, false
	}
	return a.ds, a.keys, true
}

// RootTag implements Anchors.
func (f Fixed) RootTag(tag uint16) bool {
	ds, keys, _ := f.At(dnsname.Root)
	for rdata := range query.RDatas(ds) {
		if d, ok := rrsig.ParseDS(rdata); ok && d.KeyTag == tag {
			return true
		}
	}
	for rdata := range query.RDatas(keys) {
		if k := rrsig.ParseKey(rdata); k != nil && k.Tag == tag {
			return true
		}
	}
	return false
}
