//go:build unix

package training

import (
	"bytes"
	"log"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func observed(t *testing.T) (*observers, *bytes.Buffer) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var said bytes.Buffer
	o := &observers{Listener: l, slots: make(chan struct{}, observerConns), closed: make(chan struct{}),
		log: log.New(&observerLog{warn: func(s string) { said.WriteString(s) }}, "", 0)}
	t.Cleanup(func() { _ = o.Close() })
	return o, &said
}

// A run serves a bounded number of connections; the next is served when one ends.
func TestObserversAreFew(t *testing.T) {
	o, _ := observed(t)
	var held []net.Conn
	for range observerConns + 1 {
		c, err := net.Dial("tcp", o.Addr().String())
		require.NoError(t, err)
		defer c.Close()
	}
	for range observerConns {
		c, err := o.Accept()
		require.NoError(t, err)
		held = append(held, c)
	}
	next := make(chan error, 1)
	go func() {
		c, err := o.Accept()
		if err == nil {
			err = c.Close()
		}
		next <- err
	}()
	require.Empty(t, next)
	require.NoError(t, held[0].Close())
	_ = held[0].Close() // a second close frees no second slot
	require.NoError(t, <-next)
	require.Len(t, o.slots, observerConns-1)
	require.NoError(t, o.Close())
	_, err := o.Accept()
	require.Error(t, err)
}

// Connections never use the last file descriptors, and the run's log says so once.
func TestObserversLeaveFilesToSaves(t *testing.T) {
	o, said := observed(t)
	var was syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was))
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	few := was
	few.Cur = uint64(f.Fd()) + savesFiles // fewer are left once both ends are open
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &few))
	defer func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was)) }()
	ended := make(chan error, 1)
	go func() { _, err := o.Accept(); ended <- err }()
	for range 3 {
		c, err := net.Dial("tcp", o.Addr().String())
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err, "closed")
		_ = c.Close()
	}
	require.NoError(t, o.Close())
	require.Error(t, <-ended)
	require.Equal(t, 1, strings.Count(said.String(), "--metrics-addr: connections are refused while fewer than 32"), said.String())
}
