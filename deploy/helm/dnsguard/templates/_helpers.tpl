{{- define "dnsguard.dnsService" -}}
{{ ((.Values.config.kubernetes | default dict).dnsService) | default "kube-system/kube-dns" }}
{{- end }}

{{- define "dnsguard.control" -}}
{{ .Values.config.control | default "/run/dnsguard/control.sock" }}
{{- end }}

{{- /* Where Prometheus finds a pod: nowhere without HTTP, and on loopback. */ -}}
{{- define "dnsguard.httpPort" -}}
{{- $http := hasKey .Values.config "http" | ternary (get .Values.config "http") ":9253" }}
{{- if not (regexMatch "^(127[.]|\\[::1\\])" $http) }}{{ regexFind "[0-9]+$" $http }}{{ end }}
{{- end }}

{{- define "dnsguard.image" -}}
{{- if and .Values.image.tag .Values.image.digest }}
{{- fail "image.tag and image.digest are both set: only the digest would count; leave one empty" }}
{{- end }}
{{- .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}
