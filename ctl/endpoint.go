package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) endpointCommand() *cobra.Command {
	c := t.group("endpoint", "Endpoint related commands")
	cluster := c.PersistentFlags().Bool("cluster", false, "all members of the cluster, instead of --endpoints")
	c.AddCommand(t.endpointHealthCommand(cluster), t.endpointStatusCommand(cluster), t.endpointHashKVCommand(cluster))
	return c
}

// chosenEndpoints returns the endpoints of the client, or of the whole cluster.
func (t *tool) chosenEndpoints(client *clientv3.Client, cluster bool) ([]string, error) {
	if cluster {
		return t.memberEndpoints(client)
	}
	return client.Endpoints(), nil
}

// endpointHealth tells if a member can serve a read that a quorum agrees to.
type endpointHealth struct {
	Endpoint string `json:"endpoint"`
	Health   bool   `json:"health"`
	Took     string `json:"took"`
	Error    string `json:"error,omitempty"`
}

// errUnhealthy says that an endpoint is not healthy; which one, was told already.
var errUnhealthy = errors.New("unhealthy cluster")

// healthProbes bounds how many members are asked at once.
const healthProbes = 64

func (t *tool) endpointHealthCommand(cluster *bool) *cobra.Command {
	return &cobra.Command{
		Use:   "health",
		Short: "Checks the healthiness of endpoints specified in `--endpoints` flag",
		RunE: func(c *cobra.Command, _ []string) error {
			p, err := t.setup(c)
			if err != nil {
				return err
			}
			cfg, err := t.clientConfig(c)
			if err != nil {
				return err
			}
			endpoints := cfg.Endpoints
			if *cluster {
				client, err := clientv3.New(cfg)
				if err != nil {
					return exit(exitConnection, err)
				}
				defer closeClient(client)
				if endpoints, err = t.memberEndpoints(client); err != nil {
					return err
				}
			}
			results := t.probe(cfg, endpoints)
			if err := p.health(results, t.err); err != nil {
				return err
			}
			for _, r := range results {
				if !r.Health {
					return errUnhealthy
				}
			}
			return nil
		},
	}
}

// probe asks all endpoints at once, each through a client of its own, and returns the answers in the order of the endpoints.
func (t *tool) probe(cfg clientv3.Config, endpoints []string) []endpointHealth {
	if len(endpoints) == 0 {
		return nil
	}
	results := make([]endpointHealth, len(endpoints))
	slots := make(chan struct{}, healthProbes)
	var probes sync.WaitGroup
	for i, endpoint := range endpoints {
		probes.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			cfg := cfg
			cfg.Endpoints = []string{endpoint}
			r := endpointHealth{Endpoint: endpoint}
			if took, err := t.probeOne(cfg); err != nil {
				r.Error = err.Error()
				r.Took = took
			} else {
				r.Health, r.Took = true, took
			}
			results[i] = r
		})
	}
	probes.Wait()
	return results
}

func (t *tool) probeOne(cfg clientv3.Config) (took string, err error) {
	client, err := clientv3.New(cfg)
	if err != nil {
		return "", err
	}
	defer closeClient(client)
	ctx, cancel := t.commandContext()
	defer cancel()
	start := time.Now()
	// A linearizable read needs a quorum. A member that refuses it by its rules of access has asked the quorum, too.
	_, err = client.Get(ctx, "health")
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		err = nil
	}
	if err == nil {
		err = activeAlarms(ctx, client)
	}
	return time.Since(start).String(), err
}

// activeAlarms is an error that names the alarms, if there are any.
func activeAlarms(ctx context.Context, client *clientv3.Client) error {
	r, err := client.AlarmList(ctx)
	if err != nil {
		return fmt.Errorf("unable to fetch the alarm list: %w", err)
	}
	if len(r.Alarms) == 0 {
		return nil
	}
	var b strings.Builder
	b.WriteString("Active Alarm(s): ")
	for _, a := range r.Alarms {
		b.WriteString(a.GetAlarm().String() + " ")
	}
	return errors.New(b.String())
}

// endpointStatus is a member's answer about itself.
type endpointStatus struct {
	Endpoint string                   `json:"Endpoint"`
	Status   *clientv3.StatusResponse `json:"Status"`
}

func (t *tool) endpointStatusCommand(cluster *bool) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Prints out the status of endpoints specified in `--endpoints` flag",
		Long: `Prints the status of members. In the output format "simple" a line is:

  ` + strings.ToLower(strings.Join(statusHeader, ", ")),
		RunE: func(c *cobra.Command, _ []string) error {
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			endpoints, err := t.chosenEndpoints(client, *cluster)
			if err != nil {
				return err
			}
			var statuses []endpointStatus
			failed := false
			for _, endpoint := range endpoints {
				ctx, cancel := t.commandContext()
				r, err := client.Status(ctx, endpoint)
				cancel()
				if err != nil {
					failed = true
					fmt.Fprintf(t.err, "Failed to get the status of endpoint %s (%v)\n", endpoint, err)
					t.tellEndpoint(err, endpoint)
					continue
				}
				statuses = append(statuses, endpointStatus{Endpoint: endpoint, Status: r})
			}
			if err := p.statuses(statuses); err != nil {
				return err
			}
			if failed {
				return exit(exitFailed, nil)
			}
			return nil
		},
	}
}

// endpointHashKV is a member's hash of its history.
type endpointHashKV struct {
	Endpoint string                   `json:"Endpoint"`
	HashKV   *clientv3.HashKVResponse `json:"HashKV"`
}

func (t *tool) endpointHashKVCommand(cluster *bool) *cobra.Command {
	var revision int64
	c := &cobra.Command{
		Use:   "hashkv",
		Short: "Prints the KV history hash for each endpoint in --endpoints",
		RunE: func(c *cobra.Command, _ []string) error {
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			endpoints, err := t.chosenEndpoints(client, *cluster)
			if err != nil {
				return err
			}
			var hashes []endpointHashKV
			var failure error
			for _, endpoint := range endpoints {
				ctx, cancel := t.commandContext()
				r, err := client.HashKV(ctx, endpoint, revision)
				cancel()
				if err != nil {
					failure = err
					fmt.Fprintf(t.err, "Failed to get the hash of endpoint %s (%v)\n", endpoint, err)
					continue
				}
				hashes = append(hashes, endpointHashKV{Endpoint: endpoint, HashKV: r})
			}
			if err := p.hashes(hashes); err != nil {
				return err
			}
			return failure
		},
	}
	c.Flags().Int64Var(&revision, "rev", 0, "revision up to which to hash; 0 is the latest")
	return c
}
