package admin

import (
	"fmt"

	adminv1 "github.com/sluice-dns/sluice/proto/admin/v1"
	userv1 "github.com/sluice-dns/sluice/proto/user/v1"
	"github.com/sluice-dns/sluice/usercache"
)

// ShowDataset renders what a resolver holds of a dataset. State, head, lag, the last error of following and
// the buckets left are the follower's to fill in.
func ShowDataset(d *usercache.Dataset) *adminv1.DatasetStatus {
	s, root := d.Status(), d.Root()
	m := &adminv1.DatasetStatus{
		Kind: string(s.Kind), Revision: s.Revision, Head: s.Revision, Root: fmt.Sprintf("%x", root[:]), Records: s.Records,
		Totals: &userv1.Totals{
			Users: s.Totals.Users, EnabledUsers: s.Totals.EnabledUsers, Devices: s.Totals.Devices, RecordBytes: s.Totals.RecordBytes,
		},
		Overlay: uint64(s.Overlay), Generation: s.Generation, GuardTripped: s.GuardTripped, Error: s.DiskError,
	}
	if !s.Identity.IsZero() {
		m.Dataset, m.Lineage = fmt.Sprintf("%x", s.Identity.Dataset[:]), fmt.Sprintf("%x", s.Identity.Lineage[:])
	}
	if m.Error == "" {
		m.Error = s.GuardDetail
	}
	return m
}
