package password

import (
	"strings"
	"testing"
)

func TestVerify(t *testing.T) {
	phc, err := New("correct horse")
	if err != nil {
		t.Fatal(err)
	}
	h, err := Parse(phc)
	if err != nil || h.String() != phc {
		t.Fatalf("%q reads as %q, %v", phc, h, err)
	}
	if again, _ := New("correct horse"); again == phc {
		t.Error("two hashes share their salt")
	}
	for password, want := range map[string]bool{
		"correct horse": true, "correct horsf": false, "": false, "correct horse ": false, strings.Repeat("x", MaxLen+1): false,
	} {
		if got := h.Verify(password); got != want {
			t.Errorf("%.20q verifies: %v", password, got)
		}
	}
	// The reference program's own: echo -n password | argon2 somesalt -id -t 2 -m 8 -p 2.
	for _, phc := range []string{
		"$argon2id$v=19$m=256,t=2,p=2$c29tZXNhbHQ$bQk8UB/VmZZF4Oo79iDXuL5/0ttZwg2f/5U52iv1cDc",
	} {
		if h, err := Parse(phc); err != nil || !h.Verify("password") {
			t.Errorf("%s does not verify: %v", phc, err)
		}
	}
	for _, short := range []string{"", "seven..", strings.Repeat("x", MaxLen+1)} {
		if _, err := New(short); err == nil {
			t.Errorf("a password of %d bytes is taken", len(short))
		}
	}
}

func TestParse(t *testing.T) {
	const salt, sum = "c29tZXNhbHQ", "CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"
	for name, c := range map[string]struct{ phc, says string }{
		"empty":              {"", "form"},
		"argon2i":            {"$argon2i$v=19$m=65536,t=2,p=1$" + salt + "$" + sum, "form"},
		"bcrypt":             {"$2b$12$abcdefghijklmnopqrstuv", "form"},
		"older version":      {"$argon2id$v=16$m=65536,t=2,p=1$" + salt + "$" + sum, "version"},
		"no version":         {"$argon2id$m=65536,t=2,p=1$" + salt + "$" + sum, "form"},
		"memory":             {"$argon2id$v=19$m=65537,t=1,p=1$" + salt + "$" + sum, "m=65537"},
		"memory of 4 TiB":    {"$argon2id$v=19$m=4294967295,t=1,p=1$" + salt + "$" + sum, "m=4294967295"},
		"memory beyond":      {"$argon2id$v=19$m=4294967296,t=1,p=1$" + salt + "$" + sum, "no parameter m"},
		"passes":             {"$argon2id$v=19$m=8,t=17,p=1$" + salt + "$" + sum, "t=17"},
		"no pass":            {"$argon2id$v=19$m=8,t=0,p=1$" + salt + "$" + sum, "t=0"},
		"threads":            {"$argon2id$v=19$m=65536,t=1,p=5$" + salt + "$" + sum, "p=5"},
		"no thread":          {"$argon2id$v=19$m=65536,t=1,p=0$" + salt + "$" + sum, "p=0"},
		"memory times time":  {"$argon2id$v=19$m=65536,t=5,p=1$" + salt + "$" + sum, "times"},
		"too little memory":  {"$argon2id$v=19$m=8,t=1,p=2$" + salt + "$" + sum, "8 KiB"},
		"order":              {"$argon2id$v=19$t=1,m=64,p=1$" + salt + "$" + sum, "no parameter m"},
		"a sign":             {"$argon2id$v=19$m=+64,t=1,p=1$" + salt + "$" + sum, "no parameter m"},
		"a zero in front":    {"$argon2id$v=19$m=064,t=1,p=1$" + salt + "$" + sum, "no parameter m"},
		"a fourth parameter": {"$argon2id$v=19$m=64,t=1,p=1,data=x$" + salt + "$" + sum, "other parameters"},
		"short salt":         {"$argon2id$v=19$m=64,t=1,p=1$c29t$" + sum, "salt"},
		"bad salt":           {"$argon2id$v=19$m=64,t=1,p=1$c29tZX=hbHQ$" + sum, "salt"},
		"short sum":          {"$argon2id$v=19$m=64,t=1,p=1$" + salt + "$c29tZXNhbHQ", "sum"},
		"no sum":             {"$argon2id$v=19$m=64,t=1,p=1$" + salt + "$", "sum"},
		"too long":           {"$argon2id$v=19$m=64,t=1,p=1$" + salt + "$" + strings.Repeat("A", 300), "longer"},
	} {
		if _, err := Parse(c.phc); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want one that says %q", name, err, c.says)
		} else if strings.Contains(err.Error(), sum) {
			t.Errorf("%s: the error tells the hash: %v", name, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc")
	f.Add("$argon2id$v=19$m=8,t=1,p=1$$")
	f.Fuzz(func(t *testing.T, phc string) {
		h, err := Parse(phc)
		if err == nil && (h.String() != phc || h.memory > maxMemory || h.memory*h.time > maxWork || h.time == 0 || h.threads == 0 || h.threads > maxThreads) {
			t.Errorf("%q reads as %v", phc, h)
		}
	})
}
