package wire

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"time"

	"golang.org/x/net/http2"
)

// Options say how to connect.
type Options struct {
	TLS     *tls.Config // nil: cleartext
	Within  time.Duration
	OnClose func(error) // called on the reading goroutine when the connection has ended, after the last End
}

// Dial connects to a server at host:port, or at the path of a unix socket, and waits for its first settings.
func Dial(ctx context.Context, network, address string, o Options) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Within)
	defer cancel()
	var d net.Dialer
	plain, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	out, err := newSender(plain)
	if err != nil {
		plain.Close()
		return nil, err
	}
	c := &Conn{
		nc: plain, out: out, address: address, onClose: o.OnClose,
		ready: make(chan struct{}), closed: make(chan struct{}),
		window: firstWindow, streamFirst: firstWindow, frameMost: frameMax, streamsMost: math.MaxUint32, nextID: 1, others: make(map[uint32]*Call),
	}
	scheme, authority := "http", address
	if network == "unix" {
		authority = "localhost"
	}
	if o.TLS != nil {
		scheme = "https"
		if err := c.shake(ctx, out, o.TLS); err != nil {
			plain.Close()
			return nil, fmt.Errorf("TLS with %s: %w", address, err)
		}
	}
	c.header = newHeaderWriter(scheme, authority)
	c.buf = append(c.buf, http2.ClientPreface...)
	c.buf = appendFrameHeader(c.buf, 12, http2.FrameSettings, 0, 0)
	c.buf = appendSetting(c.buf, http2.SettingEnablePush, 0)
	c.buf = appendSetting(c.buf, http2.SettingInitialWindowSize, streamWindow)
	c.buf = appendWindow(c.buf, 0, connWindow-firstWindow)
	go c.read()
	c.mu.Lock()
	c.flush()
	c.mu.Unlock()
	select {
	case <-c.ready:
	case <-ctx.Done():
		c.fail(fmt.Errorf("%s took the connection and says nothing: it wants TLS, or is no gRPC server (%w)", address, ctx.Err()))
		<-c.closed
	}
	c.mu.Lock()
	err = c.err
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Conn) shake(ctx context.Context, out *sender, config *tls.Config) error {
	config = config.Clone()
	config.NextProtos = []string{http2.NextProtoTLS}
	if config.ServerName == "" && !config.InsecureSkipVerify {
		host, _, err := net.SplitHostPort(c.address)
		if err != nil {
			return fmt.Errorf("no host name to check the certificate against: %w", err)
		}
		config.ServerName = host
	}
	secure := tls.Client(out, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		return err
	}
	if p := secure.ConnectionState().NegotiatedProtocol; p != http2.NextProtoTLS && p != "" {
		return errors.New("the server chose protocol " + p)
	}
	c.nc, c.out = secure, secure
	return nil
}

func appendSetting(b []byte, id http2.SettingID, value uint32) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(id))
	return binary.BigEndian.AppendUint32(b, value)
}
