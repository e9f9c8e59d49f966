package main

import "fmt"

const (
	smallPrefix = "/registry/small/"
	largePrefix = "/registry/large/"
	smallValue  = 300
	largeValue  = 1024
)

// workload is one line of `engram bench`, and what is expected of it.
type workload struct {
	name    string
	members int  // of the cluster that is loaded
	filled  bool // it works on a store that was filled before
	large   bool // on that of large values
	args    func(s sizes) []string
	// Targets; 0: none is stated.
	cpu        float64 // server CPU per operation in microseconds
	throughput float64 // times etcd's
	cpuRatio   float64 // by etcd's
	latency    float64 // p50 and p99 by etcd's
}

// at is the usual load: 50 connections of 20 streams.
func at(command string, more ...string) func(sizes) []string {
	return func(sizes) []string {
		return append([]string{command, "--connections=50", "--streams=20"}, more...)
	}
}

func oneStream(command string) func(sizes) []string {
	return func(sizes) []string { return []string{command, "--connections=1", "--streams=1"} }
}

func list(command string, limit int) func(sizes) []string {
	return func(sizes) []string {
		return []string{command, "--connections=8", "--streams=1", fmt.Sprint("--limit=", limit)}
	}
}

// kubernetes is the load of a Kubernetes cluster: as fast as answers come, with --speed=0, or at a rate.
func kubernetes(how string) func(sizes) []string {
	return func(s sizes) []string {
		return []string{"kubernetes", "--connections=4", "--streams=50", fmt.Sprint("--nodes=", s.nodes), how}
	}
}

// steadyRate is that of the open loops, in operations a second: low enough for both.
const steadyRate = 2000

func steady(command string) func(sizes) []string {
	return at(command, fmt.Sprint("--rate=", steadyRate))
}

var workloads = []workload{
	{name: "put", members: 1, filled: true, args: at("put"), cpu: 12, throughput: 5},
	{name: "get", members: 1, filled: true, args: at("get"), cpu: 6, throughput: 5},
	{name: "serializable-get", members: 1, filled: true, args: at("get", "--serializable"), cpu: 6, throughput: 5},
	{name: "txn", members: 1, filled: true, args: at("txn"), cpu: 14, throughput: 5},
	{name: "list-1000", members: 1, filled: true, large: true, args: list("list", 1_000), cpu: 1_500, throughput: 10},
	{name: "list-10000", members: 1, filled: true, large: true, args: list("list", 10_000), cpu: 8_000, throughput: 10},
	{name: "list-stream-10000", members: 1, filled: true, large: true, args: list("list-stream", 10_000), cpu: 8_000, throughput: 10},
	{name: "watch-1000", members: 1, args: func(s sizes) []string {
		return []string{"watch", fmt.Sprint("--watchers=", s.watchers), "--connections=10", "--writers=1", "--streams=4", fmt.Sprint("--value-size=", smallValue)}
	}},
	{name: "keep-alive", members: 1, args: func(s sizes) []string {
		return []string{"keep-alive", "--connections=50", "--streams=20", fmt.Sprint("--leases=", s.leases)}
	}},
	{name: "kubernetes", members: 1, args: kubernetes("--speed=0")},
	{name: "put-one-stream", members: 1, filled: true, args: oneStream("put"), cpuRatio: 0.25, latency: 1},
	{name: "get-one-stream", members: 1, filled: true, args: oneStream("get"), cpuRatio: 0.25, latency: 1},
	{name: "put-steady", members: 1, filled: true, args: steady("put"), latency: 1},
	{name: "get-steady", members: 1, filled: true, args: steady("get"), latency: 1},
	{name: "kubernetes-steady", members: 1, args: kubernetes(fmt.Sprint("--rate=", steadyRate)), latency: 1},
	{name: "put-three-members", members: 3, filled: true, args: at("put"), throughput: 5, cpuRatio: 1.0 / 3},
}

// store are the flags of the keys that a workload works on.
func (w workload) store(s sizes) []string {
	if w.large {
		return []string{"--prefix=" + largePrefix, fmt.Sprint("--keys=", s.large), fmt.Sprint("--value-size=", largeValue)}
	}
	return []string{"--prefix=" + smallPrefix, fmt.Sprint("--keys=", s.small), fmt.Sprint("--value-size=", smallValue)}
}
