package grpcserver

import (
	"encoding/binary"

	"golang.org/x/net/http2"
)

// Frame types of RFC 9113, section 6.
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	framePriority     = 0x2
	frameRSTStream    = 0x3
	frameSettings     = 0x4
	framePushPromise  = 0x5
	framePing         = 0x6
	frameGoAway       = 0x7
	frameWindowUpdate = 0x8
	frameContinuation = 0x9
)

// Flags of frames.
const (
	flagEndStream  = 0x1
	flagAck        = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20
)

// Settings of RFC 9113, section 6.5.2.
const (
	settingHeaderTableSize      = 0x1
	settingEnablePush           = 0x2
	settingMaxConcurrentStreams = 0x3
	settingInitialWindowSize    = 0x4
	settingMaxFrameSize         = 0x5
	settingMaxHeaderListSize    = 0x6
)

const (
	frameHeaderLen = 9
	// maxFrame is the largest payload that is taken, which is what every HTTP/2
	// endpoint must take; a larger one would only make streams wait for each other.
	maxFrame = 16 << 10
	// defaultWindow is what a side may send before it heard of other windows.
	defaultWindow = 65535
	maxWindow     = 1<<31 - 1
)

// preface is what a client begins an HTTP/2 connection with.
const preface = http2.ClientPreface

// frameHeader is the beginning of a frame.
type frameHeader struct {
	length int
	typ    byte
	flags  byte
	stream uint32
}

// parseFrameHeader reads the first frameHeaderLen bytes of b.
func parseFrameHeader(b []byte) frameHeader {
	_ = b[8]
	return frameHeader{
		length: int(b[0])<<16 | int(b[1])<<8 | int(b[2]),
		typ:    b[3],
		flags:  b[4],
		stream: binary.BigEndian.Uint32(b[5:]) & maxWindow,
	}
}

// appendFrameHeader adds the beginning of a frame to dst.
func appendFrameHeader(dst []byte, length int, typ, flags byte, stream uint32) []byte {
	return append(dst, byte(length>>16), byte(length>>8), byte(length), typ, flags,
		byte(stream>>24), byte(stream>>16), byte(stream>>8), byte(stream))
}

func appendRSTStream(dst []byte, stream uint32, code http2.ErrCode) []byte {
	dst = appendFrameHeader(dst, 4, frameRSTStream, 0, stream)
	return binary.BigEndian.AppendUint32(dst, uint32(code))
}

func appendWindowUpdate(dst []byte, stream, increment uint32) []byte {
	dst = appendFrameHeader(dst, 4, frameWindowUpdate, 0, stream)
	return binary.BigEndian.AppendUint32(dst, increment)
}

func appendPing(dst []byte, flags byte, data [8]byte) []byte {
	dst = appendFrameHeader(dst, 8, framePing, flags, 0)
	return append(dst, data[:]...)
}

func appendGoAway(dst []byte, last uint32, code http2.ErrCode, why string) []byte {
	dst = appendFrameHeader(dst, 8+len(why), frameGoAway, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, last)
	dst = binary.BigEndian.AppendUint32(dst, uint32(code))
	return append(dst, why...)
}

func appendSetting(dst []byte, id uint16, value uint32) []byte {
	dst = binary.BigEndian.AppendUint16(dst, id)
	return binary.BigEndian.AppendUint32(dst, value)
}
