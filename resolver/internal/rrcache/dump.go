package rrcache

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"github.com/sluice-dns/sluice/resolver/clock"
	"github.com/sluice-dns/sluice/resolver/internal/dnsname"
	"github.com/sluice-dns/sluice/resolver/internal/dnswire"
	"github.com/sluice-dns/sluice/resolver/internal/query"
)

// A dump is, with numbers in big-endian order,
//
//	"sluicerr", version 1, the date in nanoseconds since 1970 (8 bytes),
//	blocks {length 4, CRC-32C of the content 4, content}, the last of length 0
//
// and a block's content is records
//
//	rank 1, 1 if a denial 1, seconds until its end (signed) 4, length of the payload 2, payload
//
// with payloads as they stand in the table: key, then value. There is no status: what a dump holds is
// unchecked when it comes back, and the validator judges it when it is used. A status would rest on more than
// the data: on anchors, on negative ones and on a clock, any of which may be others when the dump is read, and
// on a file that nothing protects but its permissions. Checking anew costs a signature for each set used.
const (
	dumpMagic   = "sluicerr"
	dumpVersion = 1
	dumpBlock   = 64 << 10 // a block is closed when it is longer
	maxDumpLen  = 2*dumpBlock + 64
	recordHead  = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	// ErrDump is wrapped by the errors of Load that speak of what it read.
	ErrDump = errors.New("not a usable cache dump")
	// ErrOldDump is the error of Load for a dump so old that all in it has ended.
	ErrOldDump = errors.New("too old: all in it has ended")
)

// Dump is DumpUntil without an early end.
func (c *Cache) Dump(w io.Writer, now clock.Instant, wall time.Time) (int, error) {
	return c.DumpUntil(w, now, wall, nil)
}

// DumpUntil writes what is not past its end, or may still be had as stale, to w, and returns how many entries
// that were. What is used most comes first. If enough is not nil it is asked after every 64 KiB or so, with how
// many bytes have been written, and ends the dump, which is then a whole one of fewer entries.
//
// The cache goes on serving meanwhile; an entry that moves at that moment may be missing or come twice. wall is
// the date at now.
func (c *Cache) DumpUntil(w io.Writer, now clock.Instant, wall time.Time, enough func(written int64) bool) (int, error) {
	out := bufio.NewWriterSize(w, dumpBlock)
	head := append([]byte(dumpMagic), dumpVersion)
	head = binary.BigEndian.AppendUint64(head, uint64(wall.UnixNano()))
	if _, err := out.Write(head); err != nil {
		return 0, err
	}
	n, written := 0, int64(len(head))
	block := make([]byte, 0, maxDumpLen)
	flush := func() error {
		written += int64(8 + len(block))
		var h [8]byte
		binary.BigEndian.PutUint32(h[:], uint32(len(block)))
		binary.BigEndian.PutUint32(h[4:], crc32.Checksum(block, castagnoli))
		if _, err := out.Write(h[:]); err != nil {
			return err
		}
		_, err := out.Write(block)
		block = block[:0]
		return err
	}
	err := c.table.Copies(func(payload []byte, m64 uint64) error {
		m := meta(m64)
		if m.epoch() != c.epoch.Load()&epochMask || m.status() == query.Bogus || m.end().Add(c.opts.MaxStale) <= now {
			return nil
		}
		negative := byte(0)
		if m.negative() {
			negative = 1
		}
		block = append(block, byte(min(m.rank(), query.RankAnswer)), negative)
		block = binary.BigEndian.AppendUint32(block, uint32(int32(m.end().Sub(now).Round(time.Second)/time.Second)))
		block = binary.BigEndian.AppendUint16(block, uint16(len(payload)))
		block = append(block, payload...)
		n++
		if len(block) < dumpBlock {
			return nil
		}
		if err := flush(); err != nil || enough == nil || !enough(written) {
			return err
		}
		return errEnough
	})
	if err == errEnough {
		err = nil
	}
	if err == nil && len(block) > 0 {
		err = flush()
	}
	if err == nil {
		err = flush() // the empty block that ends it
	}
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return n, fmt.Errorf("writing a cache dump: %w", err)
	}
	return n, nil
}

var errEnough = errors.New("enough")

// Load is LoadAll without the number of entries skipped.
func (c *Cache) Load(r io.Reader, now clock.Instant, wall time.Time) (int, error) {
	n, _, err := c.LoadAll(r, now, wall)
	return n, err
}

// LoadAll adds what a dump holds and has not ended since, and returns how many entries were added, and how many
// were not because they have ended, something is known, or they were purged since it began, which is before the
// first byte is read. It never replaces live data. Damage ends it with an error that wraps ErrDump; what was read
// before stays, as each block is checked before any of it is used. If everything was purged meanwhile it ends with
// ErrPurged. The dump's age is taken from the date: one from the future cannot be trusted to run down, so it is
// refused, and one in which everything has ended is not read.
func (c *Cache) LoadAll(r io.Reader, now clock.Instant, wall time.Time) (n, skipped int, err error) {
	this := c.loads.begin()
	defer c.loads.end()
	in := bufio.NewReaderSize(r, dumpBlock)
	var head [len(dumpMagic) + 9]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return 0, 0, loadError("its head", err)
	}
	if string(head[:len(dumpMagic)]) != dumpMagic || head[len(dumpMagic)] != dumpVersion {
		return 0, 0, fmt.Errorf("%w: it does not begin with %q and version %d", ErrDump, dumpMagic, dumpVersion)
	}
	at := time.Unix(0, int64(binary.BigEndian.Uint64(head[len(dumpMagic)+1:])))
	const skew = time.Minute // a clock may be set back a little
	age := wall.Sub(at)
	if age < -skew {
		return 0, 0, fmt.Errorf("%w: it was written at %v, which is in the future", ErrDump, at.UTC().Format(time.RFC3339))
	}
	age = max(age, 0)
	if age > c.opts.MaxTTL+c.opts.MaxStale {
		return 0, 0, fmt.Errorf("a cache dump of %v is %w", at.UTC().Format(time.RFC3339), ErrOldDump)
	}
	buf := make([]byte, maxDumpLen)
	for k := 1; ; k++ {
		var h [8]byte
		if _, err := io.ReadFull(in, h[:]); err != nil {
			return n, skipped, loadError(fmt.Sprintf("block %d", k), err)
		}
		size := binary.BigEndian.Uint32(h[:])
		if size == 0 {
			return n, skipped, nil
		}
		if size > maxDumpLen {
			return n, skipped, fmt.Errorf("%w: block %d claims %d bytes, more than any has", ErrDump, k, size)
		}
		block := buf[:size]
		if _, err := io.ReadFull(in, block); err != nil {
			return n, skipped, loadError(fmt.Sprintf("block %d", k), err)
		}
		if crc32.Checksum(block, castagnoli) != binary.BigEndian.Uint32(h[4:]) {
			return n, skipped, fmt.Errorf("%w: block %d is damaged", ErrDump, k)
		}
		ok := true
		if err := c.loads.block(this, func(purged []purge) {
			var added, left int
			added, left, ok = c.loadBlock(block, purged, age, now)
			n, skipped = n+added, skipped+left
		}); err != nil {
			return n, skipped, err
		}
		if !ok {
			return n, skipped, fmt.Errorf("%w: block %d holds a malformed entry", ErrDump, k)
		}
	}
}

func loadError(what string, err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("%w: it ends within %s", ErrDump, what)
	}
	return fmt.Errorf("reading %s of a cache dump: %w", what, err)
}

func (c *Cache) loadBlock(b []byte, purged []purge, age time.Duration, now clock.Instant) (n, skipped int, ok bool) {
	for len(b) > 0 {
		if len(b) < recordHead || len(b) < recordHead+int(dnswire.Uint16(b[6:])) {
			return n, skipped, false
		}
		rank, negative := query.Rank(b[0]), b[1] == 1
		left := time.Duration(int32(dnswire.Uint32(b[2:]))) * time.Second
		payload := b[recordHead : recordHead+int(dnswire.Uint16(b[6:]))]
		b = b[recordHead+len(payload):]
		kind, k, keyLen, ok := checkPayload(payload, negative)
		if !ok || rank < query.RankAdditional || rank > query.RankAnswer {
			return n, skipped, false
		}
		most := c.opts.MaxTTL
		if negative {
			most = min(most, c.opts.MaxNegativeTTL)
		}
		end := now.Add(min(left, most) - age)
		if taken(purged, kind, &k) {
			skipped++
			continue
		}
		if end <= 0 || end.Add(c.opts.MaxStale) <= now || kind == kindCut && end <= now {
			skipped++
			continue
		}
		nameHash := c.hashName(k.Name)
		if kind == kindNX && c.hasAddress(nameHash, k, now) {
			skipped++
			continue // learned since: a denial of the whole name would hide it
		}
		m := makeMeta(end, query.Unchecked, rank, negative, c.epoch.Load())
		if c.store(k, nameHash, kind, payload, keyLen, m, overDead, now) {
			n++
		} else {
			skipped++
		}
	}
	return n, skipped, true
}

func (c *Cache) hasAddress(nameHash uint64, k Key, now clock.Instant) bool {
	for _, k.Type = range [...]uint16{dnswire.TypeA, dnswire.TypeAAAA} {
		var kb keyBuf
		e, ok := c.read(nil, appendKey(kb[:0], kindSet, k), c.hash(nameHash, kindSet, k))
		if ok && !e.negative() && e.end() > now {
			return true
		}
	}
	return false
}

// checkPayload reports whether a payload from outside is one that this package could have written, so that
// what reads it later need not doubt it.
func checkPayload(b []byte, negative bool) (kind kind, k Key, keyLen int, ok bool) {
	kind, k, keyLen, ok = readKey(b)
	if !ok || !canonical(k.Name) {
		return 0, Key{}, 0, false
	}
	// What the key's reader tolerates is written in one way only.
	var kb keyBuf
	if string(appendKey(kb[:0], kind, k)) != string(b[:keyLen]) {
		return 0, Key{}, 0, false
	}
	value := b[keyLen:]
	if negative {
		sets, fine := readDenial(value, k.Name)
		ok = fine && kind != kindCut
		for i := range sets {
			ok = ok && canonical(sets[i].Name) && checkSet(&sets[i]) && (i == 0 || sets[i].Type != dnswire.TypeSOA)
		}
		return kind, k, keyLen, ok
	}
	s := query.RRset{Type: k.Type}
	var over uint32
	s.Data, s.Sigs, over, ok = splitSet(value)
	ok = ok && (over == 0 || kind == kindSet) && checkSet(&s) && kind != kindNX && (kind != kindCut || k.Type == dnswire.TypeNS)
	return kind, k, keyLen, ok
}

func canonical(n dnsname.Name) bool {
	var low [dnsname.MaxLen]byte
	if dnsname.Check([]byte(n)) != nil {
		return false
	}
	dnsname.Fold(low[:len(n)], []byte(n))
	return string(low[:len(n)]) == string(n)
}

func checkSet(s *query.RRset) bool {
	return checkRDatas(s.Type, s.Data) && len(s.Data) > 0 && checkRDatas(dnswire.TypeRRSIG, s.Sigs)
}

func checkRDatas(typ uint16, b []byte) bool {
	size := 0
	for d := range query.RDatas(b) {
		if !dnswire.CheckRData(typ, d) {
			return false
		}
		size += 2 + len(d)
	}
	return size == len(b)
}
