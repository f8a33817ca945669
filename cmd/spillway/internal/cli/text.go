package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Terminal is the width in columns to which text is wrapped.
const Terminal = 80

// Wrap prints text in lines of at most Terminal columns, broken at spaces. The first line begins
// with first, the others with rest. A longer word has a line alone.
func Wrap(w io.Writer, first, rest, text string) {
	line, begun := first, false
	for _, word := range strings.Fields(text) {
		if begun && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > Terminal {
			fmt.Fprintln(w, line)
			line, begun = rest, false
		}
		if begun {
			line += " "
		}
		line, begun = line+word, true
	}
	fmt.Fprintln(w, line)
}

// WrapFlags prints flags for a shell in lines of at most Terminal columns. Lines break between
// flags and end in backslashes, so that a copy is one command. A longer flag has a line alone.
func WrapFlags(w io.Writer, first, rest, flags string) {
	list := strings.Split(flags, " --")
	line := first + list[0]
	for i, flag := range list[1:] {
		more := ` \`
		end := more
		if i == len(list)-2 {
			end = "" // the last
		}
		if utf8.RuneCountInString(line+" --"+flag+end) > Terminal {
			fmt.Fprintln(w, line+more)
			line = rest + "--" + flag
		} else {
			line += " --" + flag
		}
	}
	fmt.Fprintln(w, line)
}

// WriteNew writes a file and creates the folders above it.
func WriteNew(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

// WriteJSON writes a document to the file of --json: "-" is stdout, "" is none.
func WriteJSON(stdout io.Writer, path string, doc any) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if path == "-" {
		_, err = stdout.Write(text)
		return err
	}
	if err := WriteNew(path, text); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}

// Keeps reports whether data written to path stays there: not if it is stdout, a pipe or a device.
func Keeps(path string) bool {
	if path == "" || path == "-" {
		return false
	}
	info, err := os.Stat(path)
	return err != nil || info.IsDir() || info.Mode().IsRegular()
}

// CheckOutput returns an error if the file that a flag names cannot be written; "" and "-" (stdout)
// pass. It does not change an existing file and removes a new one. It skips pipes and devices: the
// reader of a named pipe would see the check as its end.
func CheckOutput(flag, path string) error {
	if !Keeps(path) {
		return nil
	}
	_, old := os.Stat(path)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		var file *os.File
		if file, err = os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644); err == nil {
			err = file.Close()
		}
	}
	if err == nil && errors.Is(old, os.ErrNotExist) {
		err = os.Remove(path)
	}
	if err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return nil
}

// Count formats tokens a second; values below ten with decimals, which would round to 0 otherwise.
func Count(v float64) string {
	switch {
	case v >= 10:
		return fmt.Sprintf("%.0f", v)
	case v >= 0.01:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'g', 1, 64)
}

// LossText formats a mean loss in nats a token. It adds bits a byte if a token is a byte, and the
// perplexity otherwise.
func LossText(loss float32, bytes bool) string {
	if bytes {
		return fmt.Sprintf("%.4f (%.3f bits a byte)", loss, float64(loss)/math.Ln2)
	}
	return fmt.Sprintf("%.4f (perplexity %.4g)", loss, math.Exp(float64(loss)))
}

// TokensAreBytes reports whether a token of the run's data at path is a byte of text.
func TokensAreBytes(t interface{ ByteTokens() bool }, path string) bool {
	return t.ByteTokens() && !strings.HasSuffix(path, ".bin")
}

// RunAgain formats the number of steps that a job repeats.
func RunAgain(n int) string {
	if n == 1 {
		return "1 step is run again"
	}
	return fmt.Sprintf("%d steps are run again", n)
}
