// Package browser drives a headless Chromium over a pipe.
package browser

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Page is one page of a Chromium.
type Page struct {
	t       testing.TB
	in      *os.File
	session string

	mu      sync.Mutex
	last    int
	waiting map[int]chan reply
}

type reply struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// patience is the time limit of one call.
const patience = 3 * time.Minute

// Open opens an empty page, which closes at the end of the test. It skips the test if there is no
// Chromium.
func Open(t testing.TB) *Page {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no Chromium is installed, so the page is not opened")
	}
	toIt, in, err := os.Pipe()
	require.NoError(t, err)
	out, fromIt, err := os.Pipe()
	require.NoError(t, err)
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu",
		"--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "about:blank")
	cmd.ExtraFiles = []*os.File{toIt, fromIt} // descriptors 3 and 4
	require.NoError(t, cmd.Start())
	toIt.Close()
	fromIt.Close()
	p := &Page{t: t, in: in, waiting: map[int]chan reply{}}
	t.Cleanup(func() {
		p.session = ""
		p.call("Browser.close", nil, nil)
		in.Close()
		_ = cmd.Wait() // its exit status after closing has no meaning
		out.Close()
	})
	go p.read(bufio.NewReader(out))
	var target struct{ TargetID string }
	p.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	p.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	p.session = attached.SessionID
	return p
}

// read passes answers to the waiting calls and drops events.
func (p *Page) read(from *bufio.Reader) {
	for {
		text, err := from.ReadBytes(0)
		if err != nil {
			return
		}
		var r reply
		if json.Unmarshal(text[:len(text)-1], &r) != nil || r.ID == 0 {
			continue
		}
		p.mu.Lock()
		to := p.waiting[r.ID]
		delete(p.waiting, r.ID)
		p.mu.Unlock()
		to <- r
	}
}

// call makes a call of Chromium's DevTools protocol.
func (p *Page) call(method string, params map[string]any, result any) {
	p.t.Helper()
	to := make(chan reply, 1)
	p.mu.Lock()
	p.last++
	id := p.last
	p.waiting[id] = to
	p.mu.Unlock()
	message := map[string]any{"id": id, "method": method, "params": params}
	if p.session != "" {
		message["sessionId"] = p.session
	}
	text, err := json.Marshal(message)
	require.NoError(p.t, err)
	_, err = p.in.Write(append(text, 0))
	require.NoError(p.t, err, method)
	select {
	case r := <-to:
		require.Nil(p.t, r.Error, "%s: %+v", method, r.Error)
		if result != nil {
			require.NoError(p.t, json.Unmarshal(r.Result, result), method)
		}
	case <-time.After(patience):
		require.FailNow(p.t, "Chromium does not answer", method)
	}
}

// Go opens an address.
func (p *Page) Go(address string) {
	p.t.Helper()
	var nav struct{ ErrorText string }
	p.call("Page.navigate", map[string]any{"url": address}, &nav)
	require.Empty(p.t, nav.ErrorText, address)
}

// Show sets the window's width and the colour scheme, light or dark.
func (p *Page) Show(width int, scheme string) {
	p.t.Helper()
	p.call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false}, nil)
	p.call("Emulation.setEmulatedMedia", map[string]any{
		"features": []map[string]any{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
}

// Text returns the text value of a JavaScript expression, or of its promise.
func (p *Page) Text(expression string) string {
	p.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	p.call("Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &got)
	require.Empty(p.t, string(got.ExceptionDetails), expression)
	return fmt.Sprint(got.Result.Value)
}

// Until waits until an expression is true.
func (p *Page) Until(expression string) {
	p.t.Helper()
	holds := func() bool { return p.Text("!!("+expression+")") == "true" }
	require.Eventually(p.t, holds, patience, 50*time.Millisecond, expression)
}
