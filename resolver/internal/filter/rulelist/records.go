package rulelist

import "hash/maphash"

// MaxRecords is how many records one answer can be made of: of the rewrites of one kind of a list, or its hosts lines,
// that name the same thing under the same conditions, further ones are complained of. Real lists have one or two.
const MaxRecords = 16

// records counts the records that a list gives names.
type records struct {
	seed maphash.Seed
	n    map[uint64]uint8
}

// take reports whether a rule that adds a record to an answer has a place in it.
func (c *records) take(r *Rule) bool {
	if r.Allow || r.Bad || r.Form != HostAddr && (r.Mods == nil || r.Mods.Rewrite == nil) {
		return true
	}
	if c.n == nil {
		c.seed, c.n = maphash.MakeSeed(), make(map[uint64]uint8)
	}
	var h maphash.Hash
	h.SetSeed(c.seed)
	_ = h.WriteByte(byte(r.Form))
	_ = h.WriteByte(byte(len(r.Name)))
	_, _ = h.Write(r.Name)
	if len(r.Name) == 0 {
		_, _ = h.WriteString(r.Pattern)
	}
	if r.Mods != nil {
		conditions := *r.Mods
		conditions.Rewrite = nil
		_, _ = h.Write(conditions.AppendKey(nil))
	}
	sum := h.Sum64()
	if c.n[sum] == MaxRecords {
		return false
	}
	c.n[sum]++
	return true
}
