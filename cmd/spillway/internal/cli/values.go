package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
)

// sizeFlag is a flag with a number of bytes: a bare integer, or KB, MB, GB (decimal), KiB, MiB, GiB
// (binary).
type sizeFlag struct{ bytes *int64 }

// sizeForm matches unambiguous sizes. The parser also accepts a bare K, thousands' separators and
// exponents.
var sizeForm = regexp.MustCompile(`(?i)^[0-9]+(\.[0-9]+)? ?([KMGTPE]i?)?B$`)

// bareNumber matches a number of bytes without a unit.
var bareNumber = regexp.MustCompile(`^[0-9]+$`)

// bareUnit matches a unit that some read as decimal and others as binary.
var bareUnit = regexp.MustCompile(`(?i)^[0-9]+(\.[0-9]+)?[KMGT]$`)

// Size returns a flag that sets bytes to a size.
func Size(bytes *int64) pflag.Value { return sizeFlag{bytes} }

// List returns a flag for a comma-separated list; help calls an item of.
func List(list *[]string, of string) pflag.Value { return listFlag{list, of} }

// Counts returns a flag for a comma-separated list of numbers.
func Counts(list *[]int) pflag.Value { return countsFlag{list} }

// ParseSize reads a number of bytes: bare, or with KB, MB, GB, TB (decimal) or KiB and so on.
func ParseSize(s string) (int64, error) {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n >= 0 && n <= 1<<62 && s[0] != '+' {
		return n, nil // exactly, where a float64 would round
	}
	n, err := humanize.ParseBytes(s)
	switch {
	case bareNumber.MatchString(s):
		return 0, fmt.Errorf("%.80q is over the largest size, 4 EiB", s)
	case bareUnit.MatchString(s):
		return 0, fmt.Errorf("%q is not a size; write %[2]sB, which is decimal, or %[2]siB, which is binary", s, strings.ToUpper(s))
	case !sizeForm.MatchString(s):
		return 0, fmt.Errorf("%q is not a size; write bytes, or a number with KB, MB, GB, KiB, MiB or GiB", s)
	case err != nil || n > 1<<62:
		return 0, fmt.Errorf("%q is over the largest size, 4 EiB", s)
	}
	return int64(n), nil
}

func (f sizeFlag) Set(s string) error {
	n, err := ParseSize(s)
	if err == nil && n == 0 {
		err = errors.New("a size of 0 leaves no memory at all; leave the flag out for no cap")
	}
	if err != nil {
		return err
	}
	*f.bytes = n
	return nil
}

func (f sizeFlag) Type() string { return "SIZE" }

func (f sizeFlag) String() string {
	if *f.bytes == 0 {
		return ""
	}
	return SizeText(*f.bytes)
}

// SizeText returns the shortest form of a size that ParseSize reads exactly.
func SizeText(bytes int64) string {
	text := fmt.Sprint(bytes)
	decimal, binary := int64(1), int64(1)
	for _, prefix := range "KMGTPE" {
		decimal, binary = decimal*1000, binary*1024
		for _, in := range []string{fmt.Sprintf("%d%cB", bytes/decimal, prefix), fmt.Sprintf("%d%ciB", bytes/binary, prefix)} {
			if n, err := ParseSize(in); err == nil && n == bytes && bytes > 0 && len(in) <= len(text) {
				text = in
			}
		}
	}
	return text
}

// listFlag is a flag with a comma-separated list; given twice, the last one counts. Help calls an
// item of.
type listFlag struct {
	list *[]string
	of   string
}

func (f listFlag) Set(s string) error {
	*f.list = nil
	for _, part := range strings.Split(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*f.list = append(*f.list, part)
		}
	}
	return nil
}

func (f listFlag) Type() string { return f.of }

func (f listFlag) String() string { return strings.Join(*f.list, ",") }

// CountsOf returns the list of a flag made by Counts.
func CountsOf(v pflag.Value) []int { return *v.(countsFlag).list }

// countsFlag is a flag with a comma-separated list of numbers, or "even" for none; given twice, the
// last one counts.
type countsFlag struct{ list *[]int }

func (f countsFlag) Set(s string) error {
	if *f.list = nil; strings.EqualFold(s, "even") {
		return nil
	}
	for _, part := range strings.Split(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < 1 {
			return fmt.Errorf("%.80q is not a list of numbers of at least 1; write them as in 1,2,2", s)
		}
		*f.list = append(*f.list, n)
	}
	return nil
}

func (f countsFlag) Type() string { return "N,N,…" }

func (f countsFlag) String() string {
	var parts []string
	for _, n := range *f.list {
		parts = append(parts, strconv.Itoa(n))
	}
	return strings.Join(parts, ",")
}
