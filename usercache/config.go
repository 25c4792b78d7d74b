package usercache

import (
	"bytes"

	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"google.golang.org/protobuf/proto"
)

// A ConfigSnapshot is what the config dataset says. It is immutable.
type ConfigSnapshot struct {
	Revision uint64
	Regions  map[string]Region
	Flags    map[string]Flag
}

// A Region is what all nodes of a region share.
type Region struct {
	// Limits by name, as text.
	Limits map[string]string
	// ServerNames are labels under which devices are found in SNI.
	ServerNames []string
}

// A Flag switches something on for a part of the fleet.
type Flag struct {
	Value   string
	Regions []string // empty: all
	Share   uint32   // of these regions' nodes, in parts of 10,000
}

// A SecretsSnapshot is what the secrets dataset says. It is immutable.
type SecretsSnapshot struct {
	Revision uint64
	// TicketSeeds by region.
	TicketSeeds map[string]TicketSeed
}

// A TicketSeed is what the session-ticket keys of a region are derived from, still sealed.
type TicketSeed struct {
	Sealed              []byte
	KeyID               string
	NotBefore, NotAfter int64 // Unix seconds
}

func decodeConfig(key, b []byte) (proto.Message, error) {
	kind, _, _ := bytes.Cut(key, []byte("/"))
	switch string(kind) {
	case "region":
		return decode(b, new(userv1.Region))
	case "flag":
		return decode(b, new(userv1.Flag))
	}
	return nil, nil
}

func decodeSecrets(key, b []byte) (proto.Message, error) {
	kind, _, _ := bytes.Cut(key, []byte("/"))
	if string(kind) == "ticket-seed" {
		return decode(b, new(userv1.TicketSeed))
	}
	return nil, nil
}

func decode(b []byte, m proto.Message) (proto.Message, error) {
	if err := proto.Unmarshal(b, m); err != nil {
		return nil, errBroken
	}
	return m, nil
}

func newConfig(revision uint64, records map[string]*catalogueRecord) *ConfigSnapshot {
	c := &ConfigSnapshot{Revision: revision, Regions: make(map[string]Region), Flags: make(map[string]Flag)}
	for key, r := range records {
		switch m := r.message.(type) {
		case *userv1.Region:
			c.Regions[key[len("region/"):]] = Region{Limits: m.Limits, ServerNames: m.ServerNames}
		case *userv1.Flag:
			c.Flags[key[len("flag/"):]] = Flag{Value: m.Value, Regions: m.Regions, Share: m.Share}
		}
	}
	return c
}

func newSecrets(revision uint64, records map[string]*catalogueRecord) *SecretsSnapshot {
	s := &SecretsSnapshot{Revision: revision, TicketSeeds: make(map[string]TicketSeed)}
	for key, r := range records {
		if m, ok := r.message.(*userv1.TicketSeed); ok {
			s.TicketSeeds[key[len("ticket-seed/"):]] = TicketSeed{
				Sealed: m.Sealed, KeyID: m.KeyId, NotBefore: m.NotBefore, NotAfter: m.NotAfter,
			}
		}
	}
	return s
}
