//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const (
	unread     = 1000 // connections that send requests and do not read the answer
	atOnce     = 500  // concurrent connections
	mostMemory = 16 << 20
	mostSlower = 1.02
	// sinkCommand is the argument that makes this program the other process.
	sinkCommand = "sink"
)

// serveSink runs the other process that the same clients connect to. It accepts 16 connections.
func serveSink() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, "campaigns:", err)
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	slots := make(chan struct{}, 16)
	for {
		conn, err := l.Accept()
		if err != nil {
			os.Exit(0)
		}
		select {
		case slots <- struct{}{}:
			go func() {
				time.Sleep(10 * time.Second)
				_ = conn.Close()
				<-slots
			}()
		default:
			_ = conn.Close()
		}
	}
}

// connections opens many connections to the metrics page of a run that saves, in turn with the same
// number to another process. It compares the run's steps, saves and memory.
func (c *campaign) connections(ctx context.Context) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	sink := exec.Command(os.Args[0], sinkCommand)
	out, err := sink.StdoutPipe()
	if err == nil {
		err = sink.Start()
	}
	if err != nil {
		return err
	}
	defer func() { _ = sink.Process.Kill() }() // it ends with the campaign
	elsewhere, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return err
	}
	page := "127.0.0.1:" + port
	run := c.train("--steps", "100000000", "--save-every", "500", "--keep", "2", "--checkpoint", c.path("ck"),
		"--metrics", c.path("metrics.jsonl"), "--metrics-addr", page)
	cmd, end, err := c.background(c.path("log"), run...)
	if err != nil {
		return err
	}
	if !until(ctx, time.Minute, func() bool { return len(steps(c.path("ck"))) > 0 }) {
		return errors.Join(errors.New("no checkpoint within a minute"), end())
	}
	before, err := useOf(cmd.Process.Pid)
	if err != nil {
		return err
	}
	most := before
	look := func() {
		if u, err := useOf(cmd.Process.Pid); err == nil {
			most.resident, most.files = max(most.resident, u.resident), max(most.files, u.files)
		}
	}
	var ratios []float64
	opened, refused, reader := 0, 0, &seconds{path: c.path("metrics.jsonl")}
	idle := func(conn net.Conn) error {
		_, err := conn.Write([]byte("GET /nope HTTP/1.1\r\nHost: x\r\n\r\n"))
		return err
	}
	pipelined := func(conn net.Conn) error {
		_, err := conn.Write([]byte(strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200)))
		return err
	}
	for opened < c.n+unread && ctx.Err() == nil {
		ask, turn := idle, min(atOnce, c.n+unread-opened)
		if opened >= c.n {
			ask = pipelined
		}
		_, other := c.turn(strings.TrimSpace(elsewhere), turn, ask, reader, look)
		n, mine := c.turn(page, turn, ask, reader, look)
		opened, refused = opened+turn, refused+turn-n
		if other > 0 && mine > 0 {
			ratios = append(ratios, mine/other)
		}
	}
	wrong := status(end(), 130)
	text, err := os.ReadFile(c.path("log"))
	missed := strings.Count(string(text), "save checkpoint of step")
	if len(ratios) == 0 {
		return errors.Join(wrong, err, errors.New("no steps were measured"))
	}
	slices.Sort(ratios)
	ratio := ratios[len(ratios)/2]
	fmt.Printf("%d connections (%d of them refused at once), %d of which read nothing; %d saves missed\n", opened, refused, unread, missed)
	fmt.Printf("resident %.1f MiB, %+.1f MiB at most; %d files open, %d at most\n",
		float64(before.resident)/(1<<20), float64(most.resident-before.resident)/(1<<20), before.files, most.files)
	fmt.Printf("a step takes %.3f times as long as with the clients at another process (median of %d turns, quartiles %.3f and %.3f)\n",
		ratio, len(ratios), ratios[len(ratios)/4], ratios[len(ratios)*3/4])
	switch {
	case missed > 0:
		wrong = errors.Join(wrong, errors.New("saves were missed"))
	case most.resident > before.resident+mostMemory:
		wrong = errors.Join(wrong, errors.New("too much memory"))
	case ratio > mostSlower:
		wrong = errors.Join(wrong, errors.New("steps are slower"))
	}
	return errors.Join(wrong, err)
}

// turn opens connections to a process and holds them for a moment. It returns their number and the
// median time of a step meanwhile.
func (c *campaign) turn(addr string, n int, ask func(net.Conn) error, reader *seconds, look func()) (int, float64) {
	_ = reader.median() // skips earlier steps
	var held []net.Conn
	for range n {
		conn, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			continue
		}
		_ = conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // an error means that the socket is full, and closes it
		if ask(conn) == nil || len(held) < n {
			held = append(held, conn)
		}
	}
	for range 10 {
		time.Sleep(50 * time.Millisecond)
		look()
	}
	median := reader.median()
	for _, conn := range held {
		_ = conn.Close() // the other side may have closed it
	}
	return len(held), median
}

// seconds reads the steps' times of a growing metrics file.
type seconds struct {
	path string
	at   int64
}

// median returns the median of the steps since the last call; 0 if there were none.
func (s *seconds) median() float64 {
	f, err := os.Open(s.path)
	if err != nil {
		return 0
	}
	defer f.Close()
	if _, err := f.Seek(s.at, 0); err != nil {
		return 0
	}
	var all []float64
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if err != nil {
			break
		}
		s.at += int64(len(line))
		var step struct{ Seconds float64 }
		if json.Unmarshal(line, &step) == nil && step.Seconds > 0 {
			all = append(all, step.Seconds)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}
