package bizlogic

import "github.com/prometheus/client_golang/prometheus"

// Metrics shows where the service stands to Prometheus, as it is at each scrape. It ends with the service.
func (s *Service) Metrics() prometheus.Collector { return metrics{s} }

type metrics struct{ svc *Service }

var (
	revisionDesc     = prometheus.NewDesc("sluice_service_revision", "Newest revision of a dataset.", []string{"dataset"}, nil)
	recordsDesc      = prometheus.NewDesc("sluice_service_records", "Records of a dataset.", []string{"dataset"}, nil)
	watchesDesc      = prometheus.NewDesc("sluice_service_watches", "Watches open.", nil, nil)
	listRulesDesc    = prometheus.NewDesc("sluice_service_list_rules", "Usable rules of a list.", []string{"list"}, nil)
	listUpdatedDesc  = prometheus.NewDesc("sluice_service_list_updated_timestamp_seconds", "When the text of a list was taken.", []string{"list"}, nil)
	listFetchedDesc  = prometheus.NewDesc("sluice_service_list_fetched_timestamp_seconds", "When a list was last fetched, or found unchanged.", []string{"list"}, nil)
	listTriedDesc    = prometheus.NewDesc("sluice_service_list_tried_timestamp_seconds", "When fetching a list was last tried.", []string{"list"}, nil)
	listFailuresDesc = prometheus.NewDesc("sluice_service_list_failures", "Failures in a row to fetch a list.", []string{"list"}, nil)
	listHeldDesc     = prometheus.NewDesc("sluice_service_list_held_rules", "Rules of a list's text that the shrink guard holds; 0 without one.", []string{"list"}, nil)
	ownListsDesc     = prometheus.NewDesc("sluice_service_own_lists", "Lists at URLs that users have among their own, by how fetching goes.", []string{"state"}, nil)
	proposalsDesc    = prometheus.NewDesc("sluice_service_proposals_total", "Devices that resolvers have proposed, by what became of them.", []string{"outcome"}, nil)
	ticketsDesc      = prometheus.NewDesc("sluice_service_tickets", "Tickets for bulk transfers that are out.", nil, nil)
)

func (m metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

func (m metrics) Collect(ch chan<- prometheus.Metric) {
	st := m.svc.Status()
	for _, d := range st.Datasets {
		ch <- prometheus.MustNewConstMetric(revisionDesc, prometheus.GaugeValue, float64(d.Revision), d.Kind)
		ch <- prometheus.MustNewConstMetric(recordsDesc, prometheus.GaugeValue, float64(d.Records), d.Kind)
	}
	m.lists(ch)
	ch <- prometheus.MustNewConstMetric(watchesDesc, prometheus.GaugeValue, float64(st.Watches))
	for outcome, n := range m.svc.Proposals() {
		ch <- prometheus.MustNewConstMetric(proposalsDesc, prometheus.CounterValue, float64(n), outcome)
	}
	ch <- prometheus.MustNewConstMetric(ticketsDesc, prometheus.GaugeValue, float64(st.Tickets))
}

// lists shows how fresh lists are.
func (m metrics) lists(ch chan<- prometheus.Metric) {
	all, err := m.svc.Lists()
	if err != nil {
		return // the store cannot be read, which everything else says louder
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, l := range all {
		gauge(listRulesDesc, float64(l.Rules), l.Id)
		gauge(listUpdatedDesc, float64(l.Updated), l.Id)
		gauge(listHeldDesc, float64(l.HeldRules), l.Id)
		if l.Url != "" {
			gauge(listFetchedDesc, float64(l.Fetched), l.Id)
			gauge(listTriedDesc, float64(l.Tried), l.Id)
			gauge(listFailuresDesc, float64(l.Failures), l.Id)
		}
	}
	own, err := m.svc.OwnLists()
	if err != nil {
		return
	}
	states := map[string]int{"good": 0, "failing": 0, "held": 0, "behind": 0}
	for _, l := range own {
		switch {
		case l.HeldRules > 0:
			states["held"]++
		case l.Failures > 0:
			states["failing"]++
		case l.Behind > 0: // some who have it have no room for its new text
			states["behind"]++
		default:
			states["good"]++
		}
	}
	for state, n := range states {
		gauge(ownListsDesc, float64(n), state)
	}
}
