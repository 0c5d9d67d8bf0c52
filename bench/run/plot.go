package main

import (
	"fmt"
	"html"
	"strings"
)

// Measures of the plot, in pixels.
const (
	plotWidth   = 860
	panelWidth  = plotWidth / 2
	labelWidth  = 110
	valueWidth  = 60
	barHeight   = 16
	rowHeight   = 24
	titleHeight = 44
	barSpace    = panelWidth - labelWidth - valueWidth - 20
)

// plot draws four panels of bars: the median, with a line from least to greatest.
func (r *results) plot() string {
	panels := []column{
		{"CPU per hit at saturation, µs", hitCPU, 1, 2},
		{"CPU per hit at 5,000 queries/s, µs", cpu5k, 1, 1},
		{"CPU per miss, µs", missCPU, 1, 1},
		{"Memory per cached name, bytes", bytesPerEntry, 1, 0},
	}
	panelHeight := titleHeight + rowHeight*len(r.Servers) + 12
	height := panelHeight * len(panels) / 2

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">
<rect width="100%%" height="100%%" fill="white"/>
`, plotWidth, height)
	for i, c := range panels {
		r.panel(&b, c, i%2*panelWidth, i/2*panelHeight)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (r *results) panel(b *strings.Builder, c column, x, y int) {
	var most float64
	for _, s := range r.Servers {
		if f, ok := s.figure(c.metric); ok {
			most = max(most, f.greatest)
		}
	}
	if most == 0 {
		return
	}
	px := func(v float64) float64 { return max(v, 0) / most * barSpace }

	fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\" font-weight=\"bold\">%s <tspan fill=\"#6e7781\" font-weight=\"normal\">(less is better)</tspan></text>\n", x+12, y+26, html.EscapeString(c.title))
	row := y + titleHeight
	for _, s := range r.Servers {
		f, ok := s.figure(c.metric)
		if !ok {
			continue
		}
		fill := "#b8c4d0"
		if s.Name == "dnsguard" {
			fill = "#1f6feb"
		}
		left := x + labelWidth
		middle := float64(row) + barHeight/2.0
		fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", left-8, row+12, html.EscapeString(s.Name))
		fmt.Fprintf(b, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", left, row, px(f.median), barHeight, fill)
		fmt.Fprintf(b, "<path d=\"M%.1f %.1f H%.1f\" stroke=\"#24292f\"/>\n", float64(left)+px(f.least), middle, float64(left)+px(f.greatest))
		fmt.Fprintf(b, "<text x=\"%.1f\" y=\"%d\">%s</text>\n", float64(left)+px(f.greatest)+6, row+12, thousands(f.median/c.unit, c.digits))
		row += rowHeight
	}
}
