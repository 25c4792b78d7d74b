// Package password makes and checks the hashes of device passwords, which HTTP authentication over DoH shows.
//
// A hash is a PHC string of argon2id (RFC 9106): $argon2id$v=19$m=MEMORY,t=TIME,p=THREADS$SALT$SUM, memory in
// KiB, salt and sum in base64 without padding. New makes them; the service alone does that. Parse reads one
// that was made elsewhere and refuses those that would cost too much to check: whoever may write a hash must not
// be able to spend a resolver's memory and time with it. Verify takes tens of milliseconds and MEMORY, so its
// caller bounds how many run.
package password

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/crypto/argon2"
)

// The bounds of a password, in bytes.
const (
	MinLen = 8
	MaxLen = 1024
)

// MaxHashLen is the most bytes of a PHC string.
const MaxHashLen = 256

// The cost of the hashes that New makes: OWASP's first recommendation for argon2id, about 20 ms.
const (
	memory  = 19 * 1024 // KiB
	time    = 2
	threads = 1
)

// The most that a hash may cost. What bounds the time is memory times passes, so that is bounded too: about
// 0.3 s.
const (
	maxMemory  = 64 * 1024 // KiB
	maxTime    = 16
	maxThreads = 4
	maxWork    = 4 * maxMemory // KiB times passes
	minSalt    = 8
	maxSalt    = 64
	minSum     = 16
	maxSum     = 64
)

// New returns the PHC string of a password. Only a password of a wrong length is refused.
func New(password string) (string, error) {
	if len(password) < MinLen || len(password) > MaxLen {
		return "", fmt.Errorf("has %d bytes; %d to %d are taken", len(password), MinLen, MaxLen)
	}
	h := Hash{memory: memory, time: time, threads: threads, salt: make([]byte, 16)}
	rand.Read(h.salt)
	h.sum = h.of(password, 32)
	return h.String(), nil
}

// A Hash is a PHC string that was read.
type Hash struct {
	memory, time uint32
	threads      uint8
	salt, sum    []byte
}

// Parse reads a PHC string. An error says what is wrong with it and never holds any of it.
func Parse(phc string) (Hash, error) {
	if len(phc) > MaxHashLen {
		return Hash{}, fmt.Errorf("is longer than %d bytes", MaxHashLen)
	}
	if strings.ContainsAny(phc, "\r\n") { // package base64 would skip them
		return Hash{}, errors.New("holds a line end")
	}
	parts := strings.Split(phc, "$")
	if len(parts) != 6 || parts[0] != "" || parts[1] != "argon2id" {
		return Hash{}, errors.New("is not of the form $argon2id$v=19$m=…,t=…,p=…$SALT$SUM")
	}
	if parts[2] != "v="+strconv.Itoa(argon2.Version) {
		return Hash{}, fmt.Errorf("is not of argon2 version %d", argon2.Version)
	}
	var h Hash
	costs := strings.Split(parts[3], ",")
	if len(costs) != 3 {
		return Hash{}, errors.New("has other parameters than m, t and p")
	}
	m, err1 := number(costs[0], "m=", maxMemory)
	t, err2 := number(costs[1], "t=", maxTime)
	p, err3 := number(costs[2], "p=", maxThreads)
	if err := errors.Join(err1, err2, err3); err != nil {
		return Hash{}, err
	}
	if m < 8*p {
		return Hash{}, errors.New("has a memory of less than 8 KiB for each thread")
	}
	if m*t > maxWork {
		return Hash{}, fmt.Errorf("costs m=%d KiB times t=%d; the product may be %d at most", m, t, maxWork)
	}
	h.memory, h.time, h.threads = m, t, uint8(p)
	strict := base64.RawStdEncoding.Strict()
	var err error
	if h.salt, err = strict.DecodeString(parts[4]); err != nil || len(h.salt) < minSalt || len(h.salt) > maxSalt {
		return Hash{}, fmt.Errorf("has a salt that is not %d to %d bytes in base64", minSalt, maxSalt)
	}
	if h.sum, err = strict.DecodeString(parts[5]); err != nil || len(h.sum) < minSum || len(h.sum) > maxSum {
		return Hash{}, fmt.Errorf("has a sum that is not %d to %d bytes in base64", minSum, maxSum)
	}
	return h, nil
}

// number reads a parameter in the form in which String writes it.
func number(text, name string, most uint32) (uint32, error) {
	digits, ok := strings.CutPrefix(text, name)
	n, err := strconv.ParseUint(digits, 10, 32)
	switch {
	case !ok || err != nil || strconv.FormatUint(n, 10) != digits:
		return 0, fmt.Errorf("has no parameter %sNUMBER in its place", name)
	case n == 0 || n > uint64(most):
		return 0, fmt.Errorf("has %s%d; 1 to %d is taken", name, n, most)
	}
	return uint32(n), nil
}

// Verify reports whether the hash is of this password.
func (h Hash) Verify(password string) bool {
	return len(password) <= MaxLen && subtle.ConstantTimeCompare(h.of(password, len(h.sum)), h.sum) == 1
}

func (h Hash) of(password string, n int) []byte {
	return argon2.IDKey([]byte(password), h.salt, h.time, h.memory, h.threads, uint32(n))
}

// String returns the PHC string.
func (h Hash) String() string {
	b64 := base64.RawStdEncoding.EncodeToString
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, h.memory, h.time, h.threads, b64(h.salt), b64(h.sum))
}
