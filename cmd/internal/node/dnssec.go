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

// Unusable returns what is wrong with the files that a configuration names, beyond their syntax.
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
