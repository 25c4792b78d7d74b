package policy

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/sluice-dns/sluice/resolver/internal/replace"
	"github.com/sluice-dns/sluice/usercache"
)

// Which texts of a device's own, and of a shared policy's, are in force is remembered, so that they stay so when others are to take their place and
// have not arrived, and kept in a file (Options.OwnTexts), so that this outlives a restart: with the service away the
// new ones may be long in coming. It is written when something is judged by the text before, and at the end; that a
// device has been forgotten, or is found with texts of long ago, leaves it as if nothing were remembered, or with what
// its user once wrote. The texts themselves are blobs.

// An owner is a device in the hands of a user, since what it had in another's must not come back; or a shared policy,
// whose texts are its own whoever asks: what is compiled of them may hang on Details that all its users share.
type owner struct {
	user, device usercache.ID
	policy       string
}

func (o owner) compare(p owner) int {
	return cmp.Or(strings.Compare(o.policy, p.policy), strings.Compare(o.user.String(), p.user.String()), strings.Compare(o.device.String(), p.device.String()))
}

// isNobody reports whether it is not one but many.
func (o owner) isNobody() bool { return o.policy == "" && o.device.IsZero() }

// A usedText is one that was in force.
type usedText struct {
	sum  [32]byte
	blob bool // and not in the record, which is gone with its text
}

// A memory is what an owner had in force, and has now.
type memory struct {
	of          owner
	before, now map[string]usedText
}

func (c *compiled) memory(of owner) memory {
	return memory{of, c.remembered(of), make(map[string]usedText)}
}

// maxOfPolicy is how many texts of one policy are remembered, far beyond what it may have.
const maxOfPolicy = 1024

// whole is what is in force of a policy's: some of its users do without some of its lists.
func (m *memory) whole() map[string]usedText {
	if len(m.before) > maxOfPolicy {
		return m.now
	}
	all := maps.Clone(m.before)
	if all == nil {
		return m.now
	}
	maps.Copy(all, m.now)
	return all
}

// A keptOwner is a line of the file: the texts of an owner, by what they are of.
type keptOwner struct {
	User   string            `json:",omitempty"`
	Device string            `json:",omitempty"`
	Policy string            `json:",omitempty"`
	Texts  map[string]string // SHA-256 in hexadecimal
}

// loadTexts reads what was in force before the start.
func (p *Policy) loadTexts() {
	if p.o.OwnTexts == "" {
		return
	}
	f, err := os.OpenFile(p.o.OwnTexts, os.O_RDONLY|syscall.O_NONBLOCK, 0) // of a pipe, opening does not wait for a writer
	if err == nil {
		defer f.Close()
		err = p.own.read(f)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.o.Logger.Warn("which texts of users were in force before is not known in full; where newer ones have not arrived nothing may take their place until they do",
			"path", p.o.OwnTexts, "err", err)
	}
}

// read remembers the lines of a file, up to the first that is none.
func (c *compiled) read(r io.Reader) error {
	d := json.NewDecoder(bufio.NewReader(r))
	for n := 1; ; n++ {
		var k keptOwner
		if err := d.Decode(&k); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("object %d: %w", n, err)
		}
		who := owner{policy: k.Policy}
		if k.User != "" || k.Device != "" || k.Policy == "" {
			var ok1, ok2 bool
			who.user, ok1 = usercache.ParseID(k.User)
			who.device, ok2 = usercache.ParseID(k.Device)
			if !ok1 || !ok2 || k.Policy != "" {
				return fmt.Errorf("object %d: user %q, device %q and policy %q are not a user's device, nor a policy", n, k.User, k.Device, k.Policy)
			}
		}
		texts := make(map[string]usedText, len(k.Texts))
		for what, sum := range k.Texts {
			b, err := hex.DecodeString(sum)
			if err != nil || len(b) != 32 {
				return fmt.Errorf("object %d: %q is not a SHA-256", n, sum)
			}
			texts[what] = usedText{[32]byte(b), true}
		}
		c.remember(who, texts)
	}
}

// keptTexts are the lines of the file, in order.
func (c *compiled) keptTexts() (lines []keptOwner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range slices.SortedFunc(maps.Keys(c.before), owner.compare) {
		texts := c.before[o]
		k := keptOwner{o.user.String(), o.device.String(), o.policy, map[string]string{}}
		for what, t := range texts {
			if t.blob {
				k.Texts[what] = hex.EncodeToString(t.sum[:])
			}
		}
		if len(k.Texts) > 0 {
			lines = append(lines, k)
		}
	}
	return lines
}

// saveTexts writes what is in force if the file does not say so, and is false if that failed.
func (p *Policy) saveTexts() bool {
	if p.o.OwnTexts == "" {
		return true
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for _, k := range p.own.keptTexts() {
		_ = e.Encode(k) // strings, into memory
	}
	sum := sha256.Sum256(b.Bytes())
	if sum == p.textsSaved {
		return true
	}
	err := replace.File(p.o.OwnTexts, func(f *os.File) error {
		if _, err := f.Write(b.Bytes()); err != nil {
			return err
		}
		return f.Sync()
	})
	if err != nil {
		if !p.textsUnsaved {
			p.o.Logger.Error("which texts of users are in force cannot be kept: where newer ones have not arrived a start would have nothing in their place", "err", err, "next_try", saveAgain)
		}
		p.textsUnsaved = true
		return false
	}
	if p.textsUnsaved {
		p.o.Logger.Info("which texts of users are in force is kept again", "path", p.o.OwnTexts)
	}
	p.textsSaved, p.textsUnsaved = sum, false
	return true
}
