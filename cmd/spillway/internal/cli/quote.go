package cli

import (
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// maxQuoted is how much of what it was given an error repeats, in characters.
const maxQuoted = 80

// tame makes an error text fit to be shown: values of the command line that it
// repeats are cut to maxQuoted characters and lose their control characters, so
// that none can look like a line of our own.
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

// setValues returns the values of the flags that were set, on the command line or in
// a configuration file, and what lists among them hold.
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

// endless is a word that is no word: a part of a value, which no value matches. Paths
// are shorter. A list has items: a command that an error advises is not cut.
var endless = regexp.MustCompile(`[^\s,]{257,}`)

// short is the first maxQuoted characters of v, escaped.
func short(v string) string {
	r := []rune(v)
	more := ""
	if len(r) > maxQuoted {
		r, more = r[:maxQuoted], "…"
	}
	return escaped(string(r)) + more
}

// escaped is a text as a Go string literal holds it, without the quotes around it.
func escaped(s string) string {
	q := strconv.Quote(s)
	return q[1 : len(q)-1]
}

// OnOneLine is a path as one line of a report holds it.
func OnOneLine(path string) string {
	return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(Visible(path))
}
