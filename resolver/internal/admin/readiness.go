package admin

import (
	"context"
	"encoding/json"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Readiness says whether the resolver may be sent queries, and what it has to answer them by. It is false when
// cold, draining or broken; shedding load only shows in Degraded, because withdrawing a site that sheds sends
// its load to the next one.
type Readiness struct {
	Ready    bool
	Reasons  []string // why not: "cold", "draining", "broken: …"
	State    string   // of user data: cold, stale, fresh, suspect or unpersisted
	Degraded float64  // share of demand that is refused, 0-1
	Level    string   // of overload; "normal" or another
	Draining bool
	Dataset  string // id of the dataset "users" in hexadecimal
	Revision uint64 // of "users"
	Users    int
}

// MarshalJSON renders the body of /readyz. Its keys are part of the interface.
func (r Readiness) MarshalJSON() ([]byte, error) {
	if r.Reasons == nil {
		r.Reasons = []string{}
	}
	return json.Marshal(struct {
		Ready    bool     `json:"ready"`
		Reasons  []string `json:"reasons"`
		State    string   `json:"state"`
		Degraded float64  `json:"degraded"`
		Level    string   `json:"level"`
		Draining bool     `json:"draining"`
		Dataset  string   `json:"dataset"`
		Revision uint64   `json:"revision"`
		Users    int      `json:"users"`
	}(r))
}

// healthServer is gRPC health: the service "" is the resolver's readiness.
type healthServer struct {
	grpc_health_v1.UnimplementedHealthServer
	s *Server
}

func (h healthServer) state() grpc_health_v1.HealthCheckResponse_ServingStatus {
	if h.s.o.Readiness().Ready {
		return grpc_health_v1.HealthCheckResponse_SERVING
	}
	return grpc_health_v1.HealthCheckResponse_NOT_SERVING
}

func (h healthServer) Check(_ context.Context, req *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if req.Service != "" {
		return nil, status.Errorf(codes.NotFound, `there is no service %.80q; there is ""`, req.Service)
	}
	return &grpc_health_v1.HealthCheckResponse{Status: h.state()}, nil
}

// healthEvery is how often a watched readiness is looked at. It is a value that parts compute when asked, so
// there is nothing to be notified by.
const healthEvery = time.Second

// Watch sends readiness at once and whenever it changes. A service that does not exist gets
// SERVICE_UNKNOWN, as the protocol has it, and no more.
func (h healthServer) Watch(req *grpc_health_v1.HealthCheckRequest, stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	last := grpc_health_v1.HealthCheckResponse_ServingStatus(-1)
	for {
		now := grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN
		if req.Service == "" {
			now = h.state()
		}
		if now != last {
			last = now
			if err := stream.Send(&grpc_health_v1.HealthCheckResponse{Status: now}); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-h.s.stopping.Done():
			return status.Error(codes.Unavailable, "the resolver is stopping")
		case <-tick.C:
		}
	}
}
