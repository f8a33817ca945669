package cli

import (
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// maxQuoted is the number of characters of an input that an error repeats.
const maxQuoted = 80

// tame makes an error text safe to show. It cuts values of the command line to maxQuoted characters
// and escapes their control characters, so that none can imitate a line of this program.
func tame(text string, args []string) string {
	for _, arg := range args {
		values := []string{arg}
		if _, value, ok := strings.Cut(arg, "="); ok {
			values = append(values, value)
		}
		for _, v := range values {
			if len(v) > maxQuoted || strings.ContainsFunc(v, unicode.IsControl) {
				text = strings.ReplaceAll(text, v, short(v))
				text = strings.ReplaceAll(text, escaped(v), short(v))
			}
		}
	}
	return endless.ReplaceAllStringFunc(text, short)
}

// setValues returns the values of the flags set on the command line or in a configuration file, and
// the items of lists among them.
func setValues(cmd *cobra.Command) (list []string) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		value := f.Value.String()
		list = append(list, value)
		if parts := strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune(",;:=+", r) }); len(parts) > 1 {
			list = append(list, parts...)
		}
	})
	return list
}

// endless matches a word too long to show: part of a value that no replacement matched. Paths are
// shorter. Commas end a word, so lists in a suggested command are not cut.
var endless = regexp.MustCompile(`[^\s,]{257,}`)

// short returns the first maxQuoted characters of v, escaped.
func short(v string) string {
	r := []rune(v)
	more := ""
	if len(r) > maxQuoted {
		r, more = r[:maxQuoted], "…"
	}
	return escaped(string(r)) + more
}

// escaped returns a text as in a Go string literal, without the quotes.
func escaped(s string) string {
	q := strconv.Quote(s)
	return q[1 : len(q)-1]
}

// OnOneLine returns a path as one line, with line ends and tabs escaped.
func OnOneLine(path string) string {
	return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(Visible(path))
}
