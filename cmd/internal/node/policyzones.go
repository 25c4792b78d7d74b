package node

import (
	"fmt"
	"io"
	"os"

	"github.com/sluice-dns/sluice/cmd/internal/config"
	"github.com/sluice-dns/sluice/resolver"
)

// policyZones brings the section policy_zones into the resolver's form.
func policyZones(c *config.Sluice) ([]resolver.PolicyZone, error) {
	var out []resolver.PolicyZone
	for i, z := range c.PolicyZones {
		name, err := resolver.ParseName(z.Name)
		if err != nil {
			return nil, fmt.Errorf("policy_zones[%d].name: %w", i, err)
		}
		p := resolver.PolicyZone{Name: name, File: z.File, Action: policyActions[z.Action], Open: func() (io.ReadCloser, error) { return os.Open(z.File) }}
		if z.CNAME != "" {
			if p.Target, err = resolver.ParseName(z.CNAME); err != nil {
				return nil, fmt.Errorf("policy_zones[%d].cname: %w", i, err)
			}
		}
		out = append(out, p)
	}
	return out, nil
}

var policyActions = map[config.PolicyAction]resolver.PolicyAction{
	config.ActionGiven: resolver.ActionGiven, config.ActionDisabled: resolver.ActionDisabled, config.ActionPassthru: resolver.ActionPassThru,
	config.ActionDrop: resolver.ActionDrop, config.ActionNXDOMAIN: resolver.ActionNXDomain, config.ActionNODATA: resolver.ActionNoData,
	config.ActionTCPOnly: resolver.ActionTCPOnly, config.ActionCNAME: resolver.ActionCNAME,
}
