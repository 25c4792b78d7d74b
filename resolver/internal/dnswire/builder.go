package dnswire

// A Builder writes a message into a buffer of the caller. Names are compressed against those written before.
// Every method that writes returns false, leaving the message as it was, if what it writes does not fit.
type Builder struct {
	buf   []byte // what is written; cap is what may be
	names [maxCompress]uint16
	count int
}

// maxCompress bounds the compression table, which is searched for every name: beyond it names are written in full.
const maxCompress = 128

// Reset starts a message in out[:0]; it may grow to cap(out). The header is written by the caller at the end,
// through Header.Put on Bytes.
func (b *Builder) Reset(out []byte) {
	b.buf = out[:HeaderLen]
	clear(b.buf)
	b.count = 0
}

// Bytes returns the message so far.
func (b *Builder) Bytes() []byte { return b.buf }

// Len returns the length of the message so far.
func (b *Builder) Len() int { return len(b.buf) }

// A Mark is a point to go back to.
type Mark struct{ size, count int }

// Mark returns the present point.
func (b *Builder) Mark() Mark { return Mark{len(b.buf), b.count} }

// Back forgets what was written after m.
func (b *Builder) Back(m Mark) { b.buf, b.count = b.buf[:m.size], m.count }

// room reports whether n more bytes fit, and are within what a 16-bit length can say.
func (b *Builder) room(n int) bool { return len(b.buf)+n <= min(cap(b.buf), MaxMessage) }

// Question writes a question whose name is taken as it stands, in any case.
func (b *Builder) Question(name []byte, typ, class uint16) bool {
	if !b.room(len(name) + 4) {
		return false
	}
	b.remember(name, len(b.buf))
	b.buf = append(b.buf, name...)
	b.buf = append(b.buf, byte(typ>>8), byte(typ), byte(class>>8), byte(class))
	return true
}

// RR writes a record. rdata is expanded; its names are compressed where RFC 3597 allows it.
func (b *Builder) RR(owner []byte, typ, class uint16, ttl uint32, rdata []byte) bool {
	m := b.Mark()
	if !b.name(owner, true) || !b.room(10) {
		b.Back(m)
		return false
	}
	b.buf = append(b.buf, byte(typ>>8), byte(typ), byte(class>>8), byte(class),
		byte(ttl>>24), byte(ttl>>16), byte(ttl>>8), byte(ttl), 0, 0)
	start := len(b.buf)
	if !b.rdata(typ, rdata) {
		b.Back(m)
		return false
	}
	PutUint16(b.buf[start-2:], uint16(len(b.buf)-start))
	return true
}

func (b *Builder) rdata(typ uint16, rdata []byte) bool {
	l, _, _ := layoutOf(typ)
	if !l.compress {
		return b.raw(rdata)
	}
	off := int(l.lead)
	if !b.raw(rdata[:off]) {
		return false
	}
	for range l.names {
		end := PlainName(rdata, off)
		if end < 0 || !b.name(rdata[off:end], true) {
			return false
		}
		off = end
	}
	return b.raw(rdata[off:])
}

func (b *Builder) raw(p []byte) bool {
	if !b.room(len(p)) {
		return false
	}
	b.buf = append(b.buf, p...)
	return true
}

// name writes a name, compressed as far as an earlier one allows.
func (b *Builder) name(name []byte, compress bool) bool {
	off := 0
	for off < len(name) && name[off] != 0 {
		if at := b.find(name[off:]); compress && at >= 0 {
			start := len(b.buf)
			if !b.room(off + 2) {
				return false
			}
			b.rememberUpTo(name, off, start)
			b.buf = append(b.buf, name[:off]...)
			b.buf = append(b.buf, 0xc0|byte(at>>8), byte(at))
			return true
		}
		off += 1 + int(name[off])
	}
	start := len(b.buf)
	if !b.room(len(name)) {
		return false
	}
	b.remember(name, start)
	b.buf = append(b.buf, name...)
	return true
}

func (b *Builder) remember(name []byte, start int) { b.rememberUpTo(name, len(name)-1, start) }

// rememberUpTo enters the suffixes of name that begin before limit, name being written at start.
func (b *Builder) rememberUpTo(name []byte, limit, start int) {
	for off := 0; off < limit && name[off] != 0; off += 1 + int(name[off]) {
		if b.count == maxCompress || start+off >= 1<<14 {
			return
		}
		b.names[b.count] = uint16(start + off)
		b.count++
	}
}

// find returns where suffix, an uncompressed name, was written before, or -1.
func (b *Builder) find(suffix []byte) int {
	for _, at := range b.names[:b.count] {
		if sameName(b.buf, int(at), suffix) {
			return int(at)
		}
	}
	return -1
}

// sameName reports whether the name at off of msg, which we wrote ourselves, equals name without regard to
// case.
func sameName(msg []byte, off int, name []byte) bool {
	for i := 0; ; {
		l := int(msg[off])
		if l >= 0xc0 {
			off = l&0x3f<<8 | int(msg[off+1])
			continue
		}
		if l != int(name[i]) {
			return false
		}
		if l == 0 {
			return true
		}
		a, c := msg[off+1:off+1+l], name[i+1:i+1+l]
		for j := range a {
			if a[j] != c[j] && fold(a[j]) != fold(c[j]) {
				return false
			}
		}
		off += 1 + l
		i += 1 + l
	}
}

func fold(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// OPT writes an OPT record with the given options, already in wire form (RFC 6891 section 6.1.2).
func (b *Builder) OPT(udpSize, rcode uint16, do bool, options []byte) bool {
	if !b.room(11 + len(options)) {
		return false
	}
	var flags byte
	if do {
		flags = 0x80
	}
	b.buf = append(b.buf, 0, 0, byte(TypeOPT), byte(udpSize>>8), byte(udpSize), byte(rcode>>4), 0, flags, 0,
		byte(len(options)>>8), byte(len(options)))
	b.buf = append(b.buf, options...)
	return true
}

// AppendOption appends an EDNS option to b.
func AppendOption(b []byte, code uint16, value []byte) []byte {
	b = append(b, byte(code>>8), byte(code), byte(len(value)>>8), byte(len(value)))
	return append(b, value...)
}
