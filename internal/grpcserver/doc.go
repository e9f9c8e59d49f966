// Package grpcserver serves gRPC to very many small calls: it speaks HTTP/2
// itself, reads and writes many frames at a time, and runs the handlers of hot
// methods on the goroutine that reads the connection.
//
// It knows nothing of keys, of clusters or of any service. Server is the entry
// point; api.go has what handlers see of it. DESIGN.md says why it is as it is.
// Invariants:
//
//	G1: a call has one outcome. Whoever sets stream.settled decides it: the reply,
//	    the deadline, the client's reset or a bad message. What comes later is
//	    released and forgotten.
//	G2: a stream is in conn.streams exactly as long as stream.gone is false. Both
//	    change together, under the connection's lock.
//	G3: one goroutine at a time writes to a connection: the one that set
//	    conn.writing. Only it calls Ready and Sent of the connection's receivers.
//	G4: a receiver is closed once, by no goroutine that is inside one of its calls,
//	    and after all of those have returned.
//	G5: what a sender was promised to be told (OnSent, Send's sent) is told exactly
//	    once, when the bytes are written or will never be; by Stop's return for all
//	    that was given to the transport before.
//	G6: nothing that one client does makes memory grow beyond a bound, and each
//	    bound that is met is counted in engram_grpc_limits_total.
//
// Locks are taken in this order: inbox or bidi or outbox, outboxBudget, conn, then
// flushers, timers or Server. No handler and no receiver is called under one.
package grpcserver
