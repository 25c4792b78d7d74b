package node

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// dnssecOptions brings the section dnssec into the resolver's form.
func dnssecOptions(c *config.Sluice) (resolver.DNSSECOptions, error) {
	d := &c.DNSSEC
	o := resolver.DNSSECOptions{
		Validate: d.Validate, Follow: d.TrustAnchorUpdates, Signal: d.TrustAnchorSignalling,
		State: filepath.Join(c.DataDir, "trust-anchors"),
		Skew:  d.SignatureSkew, SHA1: d.SHA1 == config.SHA1Validate,
	}
	if f := d.TrustAnchorFile; f != "" && d.Validate {
		text, err := os.ReadFile(f)
		if err != nil {
			return o, fmt.Errorf("dnssec.trust_anchor_file: %w", err)
		}
		o.Anchors, o.AnchorsFile = string(text), f
	}
	for _, s := range d.Insecure {
		name, err := resolver.ParseName(s)
		if err != nil {
			return o, fmt.Errorf("dnssec.insecure: %q: %w", s, err)
		}
		o.Insecure = append(o.Insecure, name)
	}
	return o, nil
}

// Unusable returns what a configuration names and a resolver would refuse, beyond syntax: the contents of files,
// and local data.
func Unusable(c *config.Sluice) (faults []config.Fault) {
	if f := c.DNSSEC.TrustAnchorFile; f != "" {
		text, err := os.ReadFile(f)
		if err == nil {
			err = resolver.CheckAnchors(string(text), f)
		}
		if err != nil {
			faults = append(faults, c.Fault("dnssec.trust_anchor_file", err.Error(), `the zone's present DS records, or "" for the root's built in here`))
		}
	}
	if f := c.Recursion.RootHintsFile; f != "" {
		text, err := os.ReadFile(f)
		if err == nil && config.HoldsHints(string(text)) {
			err = resolver.CheckHints(string(text), f)
		}
		if err != nil {
			faults = append(faults, c.Fault("recursion.root_hints_file", err.Error(), `NS records of "." and addresses of their targets, or "" for what is built in`))
		}
	}
	if _, err := localRoot(c); err != nil {
		faults = append(faults, c.Fault("recursion.local_root", err.Error(), `a copy of the root zone as IANA publishes it, or ""`))
	}
	if records, keys, err := localRecords(c); err != nil {
		faults = append(faults, c.Fault(keys[len(records)], err.Error(), "TYPE RDATA as in a zone file, such as A 192.0.2.7"))
	} else if zones, err := zonesOf(c); err == nil { // with another error there is a fault already
		o := &resolver.Options{DNS64: c.DNS64.Prefix}
		o.Local.Records, o.Local.DefaultZones = records, c.Recursion.LocalZones == config.LocalZonesDefault
		o.Recursion.Zones = zones
		if i, err := resolver.CheckLocal(o); err != nil {
			faults = append(faults, c.Fault(keys[i], err.Error(), "remove it, or what it contradicts"))
		}
	}
	zones, err := policyZones(c)
	for i, z := range zones {
		if err := resolver.CheckPolicyZone(z); err != nil {
			faults = append(faults, c.Fault(fmt.Sprintf("policy_zones[%d].file", i), err.Error(), "a response policy zone in zone-file syntax"))
		}
	}
	if err != nil {
		faults = append(faults, c.Fault("policy_zones", err.Error(), ""))
	}
	return faults
}

// localRecords brings local_data into the resolver's form; keys has the key of each record and, with an error, of
// the one that it is about.
func localRecords(c *config.Sluice) (records []resolver.LocalRecord, keys []string, err error) {
	for i, d := range c.LocalData {
		for j, r := range d.Records {
			keys = append(keys, fmt.Sprintf("local_data[%d].records[%d]", i, j))
			rec, err := resolver.ParseLocal(d.Name, r)
			if err != nil {
				return records, keys, fmt.Errorf("local_data %s: %w", d.Name, err)
			}
			records = append(records, rec)
		}
	}
	return records, keys, nil
}
