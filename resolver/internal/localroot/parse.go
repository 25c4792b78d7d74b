package localroot

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha512"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"
	"time"

	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// Limits of a copy. The root zone has had some 25,000 records, in 2.3 MB of text.
const (
	MaxBytes   = 64 << 20 // of text, unpacked
	MaxRecords = 1_000_000
)

// defaultTTL is that of records without, which the published zone has none of.
const defaultTTL = 86400

const typeZONEMD = 63

// Open is Parse for a file.
func Open(file string, now time.Time) (*Zone, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return Parse(f, file, info.ModTime(), now)
}

// Parse reads a copy of the root zone. file names it in errors, modified is when it was written and now the date. A
// copy that has expired is no error.
func Parse(r io.Reader, file string, modified, now time.Time) (*Zone, error) {
	records, err := read(r, file, MaxBytes, MaxRecords)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(records, func(a, b dnswire.Record) int {
		return cmp.Or(dnsname.Compare(a.Name, b.Name), cmp.Compare(a.Type, b.Type), bytes.Compare(a.Data, b.Data))
	})
	records = slices.CompactFunc(records, func(a, b dnswire.Record) bool {
		return a.Name == b.Name && a.Type == b.Type && bytes.Equal(a.Data, b.Data)
	})
	z := &Zone{records: len(records)}
	z.gather(records)
	if err := z.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	soa := z.find(dnsname.Root, dnswire.TypeSOA)
	numbers := soaNumbers(soa)
	z.serial = dnswire.Uint32(numbers)
	if err := checkDigest(records, z.serial); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	seen := modified
	if len(soa.Sigs) > 0 {
		seen = time.Time{}
		for sig := range query.RDatas(soa.Sigs) {
			// Serial number arithmetic around now (RFC 4034 section 3.1.5). One from the future proves no more than one
			// from now.
			ahead := int32(dnswire.Uint32(sig[12:]) - uint32(now.Unix()))
			if t := now.Add(time.Duration(min(ahead, 0)) * time.Second); t.After(seen) {
				seen = t
			}
		}
	}
	z.expires = seen.Add(time.Duration(dnswire.Uint32(numbers[12:])) * time.Second)
	return z, nil
}

// read reads all records, with the names in their data in lower case where that changes no signature.
func read(r io.Reader, file string, maxBytes, maxRecords int) (records []dnswire.Record, err error) {
	b := bufio.NewReader(r)
	r = b
	if magic, _ := b.Peek(2); string(magic) == "\x1f\x8b" {
		gz, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		defer gz.Close()
		r = gz
	}
	text := &bounded{r: r, left: maxBytes}
	err = dnswire.EachRecord(text, ".", file, defaultTTL, func(r dnswire.Record) error {
		switch {
		case r.Class != dnswire.ClassIN:
			return fmt.Errorf("%s: %v: a record of class %d; the root zone is of class IN", file, r.Name, r.Class)
		case len(records) == maxRecords:
			return fmt.Errorf("%s: more than %d records, which the root zone has not got", file, maxRecords)
		}
		dnswire.CanonicalRData(r.Type, r.Data)
		records = append(records, r)
		return nil
	})
	if text.err != nil { // the text ended there, whatever it looked like
		return nil, fmt.Errorf("%s: %w", file, text.err)
	}
	return records, err
}

// A bounded reader fails behind left bytes, and keeps errors other than io.EOF.
type bounded struct {
	r    io.Reader
	left int
	err  error
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.r.Read(p)
	if b.left -= n; b.left < 0 {
		err = errors.New("it is longer than the root zone ever was")
		n = 0
	}
	if err != nil && err != io.EOF {
		b.err = err
	}
	return n, err
}

// gather makes RRsets of records that are in order.
func (z *Zone) gather(records []dnswire.Record) {
	z.sets = make(map[dnsname.Name][]query.RRset)
	for _, r := range records {
		typ, sig := r.Type, r.Type == dnswire.TypeRRSIG
		if sig {
			typ = dnswire.Uint16(r.Data)
		}
		sets := z.sets[r.Name]
		i := slices.IndexFunc(sets, func(s query.RRset) bool { return s.Type == typ })
		if i < 0 {
			i = len(sets)
			sets = append(sets, query.RRset{Name: r.Name, Type: typ, Class: dnswire.ClassIN, TTL: dnswire.ClampTTL(r.TTL)})
			z.sets[r.Name] = sets
		}
		s := &sets[i]
		s.TTL = min(s.TTL, dnswire.ClampTTL(r.TTL)) // RFC 2181 section 5.2
		if sig {
			s.Sigs = query.AppendRData(s.Sigs, r.Data)
			continue
		}
		s.Data = query.AppendRData(s.Data, r.Data)
		if typ == dnswire.TypeNSEC {
			z.chain = append(z.chain, r.Name)
		}
	}
}

// check says what keeps the records from being a root zone.
func (z *Zone) check() error {
	soa := z.find(dnsname.Root, dnswire.TypeSOA)
	switch {
	case soa == nil || query.CountRData(soa.Data) != 1:
		return errors.New(`it has not got one SOA record of "."; it is no copy of the root zone`)
	case z.find(dnsname.Root, dnswire.TypeNS) == nil:
		return errors.New(`it has no NS record of "."; it is no copy of the root zone`)
	}
	for name, sets := range z.sets {
		if name != dnsname.Root && z.find(name.Suffix(1), dnswire.TypeNS) == nil {
			return fmt.Errorf("%v is neither a delegated top-level domain nor below one; it is no copy of the root zone", name)
		}
		for i := range sets {
			if s := &sets[i]; !fits(name, s) {
				return fmt.Errorf("%v has %s records, which the root zone has not got there", name, dnswire.TypeText(s.Type))
			}
		}
	}
	return nil
}

// fits reports whether the root zone may have an RRset where it stands.
func fits(name dnsname.Name, s *query.RRset) bool {
	if len(s.Data) == 0 || s.Type == dnswire.TypeNSEC && query.CountRData(s.Data) != 1 {
		return false // signatures of nothing
	}
	switch s.Type {
	case dnswire.TypeA, dnswire.TypeAAAA:
		return name != dnsname.Root
	case dnswire.TypeNS, dnswire.TypeNSEC:
		return name.Labels() <= 1
	case dnswire.TypeDS:
		return name.Labels() == 1
	case dnswire.TypeCNAME, dnswire.TypeDNAME, dnswire.TypeNSEC3, dnswire.TypeNSEC3PARAM:
		return false
	}
	return name == dnsname.Root
}

// checkDigest compares what a ZONEMD record says with the records, which are in canonical order (RFC 8976 section 4).
// Schemes and algorithms that are not known say nothing.
func checkDigest(records []dnswire.Record, serial uint32) error {
	wanted := map[byte][]byte{} // by algorithm
	for _, r := range records {
		if r.Name != dnsname.Root || r.Type != typeZONEMD {
			continue
		}
		d := r.Data
		switch {
		case len(d) < 6+12:
			return errors.New("its ZONEMD record is malformed")
		case d[4] != 1 || d[5] != 1 && d[5] != 2:
			continue
		case dnswire.Uint32(d) != serial:
			return fmt.Errorf("its ZONEMD record is of serial %d, and the zone of %d; fetch it anew", dnswire.Uint32(d), serial)
		case wanted[d[5]] != nil:
			return errors.New("it has two ZONEMD records of one kind")
		}
		wanted[d[5]] = d[6:]
	}
	for algorithm, want := range wanted {
		var h hash.Hash
		if h = sha512.New384(); algorithm == 2 {
			h = sha512.New()
		}
		var head [10]byte
		for _, r := range records {
			if r.Name == dnsname.Root && (r.Type == typeZONEMD || r.Type == dnswire.TypeRRSIG && dnswire.Uint16(r.Data) == typeZONEMD) {
				continue
			}
			dnswire.PutUint16(head[:], r.Type)
			dnswire.PutUint16(head[2:], r.Class)
			dnswire.PutUint32(head[4:], r.TTL)
			dnswire.PutUint16(head[8:], uint16(len(r.Data)))
			io.WriteString(h, string(r.Name))
			h.Write(head[:])
			h.Write(r.Data)
		}
		if !bytes.Equal(h.Sum(nil), want) {
			return errors.New("its digest is not what its ZONEMD record says: it is damaged or was changed; fetch it anew")
		}
	}
	return nil
}
